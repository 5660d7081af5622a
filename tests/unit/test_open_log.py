"""From the options to the log: whether checkpoints share its files, how large these become, and when they may go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from statelog import ConfigurationError, Options
from statelog.log.numbered import NumberedLog
from statelog.log.open import open_log
from statelog.storage import LocalStore
from statelog.testing.clock import ManualClock
from tests.contract.log_contract import make_checkpoint, make_claim
from tests.stores import WholeObjects


def opened(root: Path, clock: ManualClock | None = None, *, appends: bool = True, **options: Any) -> NumberedLog:
    store = LocalStore(root)
    made = store if appends else WholeObjects(store)
    return open_log(made, "op", Options(**options), clock or ManualClock())


def files_of(log: NumberedLog, checkpoints: int = 3) -> int:
    """How many files some checkpoints of a run take."""
    log.claim(make_claim("run"))
    before = log.files_made
    for batch in range(checkpoints):
        log.append(*make_checkpoint("run", 1, batch))
    return log.files_made - before


@pytest.mark.parametrize(
    ("merging", "appends", "files"),
    [("auto", True, 0), ("auto", False, 3), ("across", True, 0), ("within", True, 3), ("within", False, 3)],
)
def test_checkpoints_share_a_file_where_they_may_and_can(
    tmp_path: Path, merging: str, appends: bool, files: int
) -> None:
    log = opened(tmp_path, appends=appends, file_merging=merging)
    assert files_of(log) == files
    assert [info.name.split("/")[:2] for info in LocalStore(tmp_path).list()] == [["op", "log"]] * (1 + files)


def test_a_store_that_cannot_append_cannot_be_told_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot append, so the files of several checkpoints") as raised:
        opened(tmp_path, appends=False, file_merging="across")
    assert "file_merging='within'" in raised.value.hint


def test_a_file_is_as_large_as_the_options_say(tmp_path: Path) -> None:
    assert files_of(opened(tmp_path, max_file_bytes=1)) == 3


@pytest.mark.parametrize("min_age_s", [10.0, 1000.0])
def test_files_that_older_writers_may_look_for_stay_for_as_long_as_the_options_say(
    tmp_path: Path, min_age_s: float
) -> None:
    for run in ("one", "two"):
        clock = ManualClock()
        log = opened(tmp_path, clock, file_merging="within", log_min_age_s=min_age_s)
        log.claim(make_claim(run))
    clock.advance(min_age_s - 1)
    assert log.removable(99) == []
    clock.advance(1)
    assert log.removable(99) == [log.name_of(1)]
