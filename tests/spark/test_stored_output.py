"""Whether a checkpoint with stored output can stay: every changeset, snapshot and output of it is as it was written."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from statelog.log.entry import QueryCheckpoint
from statelog.log.references import SegmentRef
from statelog.runs import digests
from statelog.spark.driver.planned_query import is_whole
from statelog.storage import LocalStore
from tests.contract.log_contract import make_checkpoint

PARTS = {"a-1/changes/1/0/1-x-0.run": b"of the keyed state" * 50, "b-2/changes/1/0/1-x-0.run": b"of the output" * 50}


def stored(store: LocalStore) -> QueryCheckpoint:
    entry, _ = make_checkpoint("a", 1, 1)
    sections = []
    for section, (name, data) in zip(entry.sections, PARTS.items(), strict=True):
        store.put(name, data)
        segment = SegmentRef(0, 1, digests.checksum(data), 0, len(data), 1, 1, name)
        sections.append(replace(section, segments=[segment]))
    return replace(entry, sections=sections)


def test_one_whose_parts_are_all_there_stays(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert is_whole(store, stored(store))


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("left", ["nothing", "cut", "zeros", "other bytes", "no file"])
def test_one_that_lacks_a_part_is_computed_again(tmp_path: Path, name: str, left: str) -> None:
    store, data = LocalStore(tmp_path), PARTS[name]
    entry = stored(store)
    forms = {
        "nothing": b"",
        "cut": data[:-1],
        "zeros": data[:200] + bytes(len(data) - 200),
        "other bytes": data[:9] + b"?" + data[10:],
    }
    store.delete([name])
    if left in forms:
        store.put(name, forms[left])
    assert not is_whole(store, entry)
