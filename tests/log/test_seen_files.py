"""A log that remembers what it has read says the same as one that reads everything, with few requests."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from statelog import StorageError
from statelog.clock import SystemClock
from statelog.log.entry import Fence
from statelog.log.numbered import NumberedLog
from statelog.log.open import open_log
from statelog.options import Options
from statelog.storage import LocalStore, Store
from statelog.testing.faults import FaultPlan, FaultStore
from statelog.testing.query import ManualClock
from tests.contract.log_contract import PREFIX, make_checkpoint, make_claim
from tests.reading.story import Story
from tests.stores import CountedStore, WholeObjects

STORES: dict[str, Callable[[str], Store]] = {
    "across": LocalStore,
    "off": LocalStore,
    "within": lambda place: WholeObjects(LocalStore(place)),
}


def log_of(store: Store, merging: str, *, remembers: bool) -> NumberedLog:
    return open_log(store, Options(file_merging=merging), SystemClock(), remembers=remembers)


def tokens(log: NumberedLog) -> list[bytes]:
    return [entry.token for entry in log.read() if not isinstance(entry, Fence)]


@pytest.fixture(params=STORES)
def merging(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def story(directory: Path, merging: str) -> Story:
    return Story(
        directory,
        open_store=STORES[merging],
        file_merging=merging,
        retained_checkpoints=2,
        materialization_interval_s=0,
        max_log_to_base=0,
        max_file_bytes=4000,
        log_min_age_s=0,
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_log_that_remembers_says_the_same(merging: str, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    query = story(tmp_path / "query", merging)
    store = STORES[merging](query.location)
    remembering = log_of(store, merging, remembers=True)
    for _ in range(25):
        match rng.randrange(8):
            case 0:
                query.start(rng.choice([1, 2, 3]))
            case 1 if len(query.models) > 1:
                del query.models[-1]  # the batch is repeated
                query.start()
            case 2 if merging == "across":
                newest = sorted((Path(query.location) / "log").glob("*.log"))[-1]
                newest.write_bytes(newest.read_bytes() + newest.read_bytes()[:30])  # a torn frame
                assert remembering.read() == log_of(store, merging, remembers=False).read()
                query.start()
            case 3:  # another query in its place
                shutil.rmtree(tmp_path / "query")
                query = story(tmp_path / "query", merging)
            case _:
                query.run_batches(rng.randrange(1, 4), rng)
        assert remembering.read() == log_of(store, merging, remembers=False).read()


def test_only_what_is_new_is_read(merging: str, tmp_path: Path) -> None:
    query = Story(tmp_path, open_store=STORES[merging], file_merging=merging)
    query.run_batches(30, random.Random(1))
    store = CountedStore(STORES[merging](query.location))
    log = log_of(store, merging, remembers=True)
    log.read()
    whole = store.take()
    log.read()
    assert store.take().reads == 0
    query.run_batches(1, random.Random(1))
    log.read()
    one = store.take()
    # Where files can grow, the start of one is read too, which tells it from another one.
    assert one.reads == (1 if merging == "within" else 2)
    assert one.read_bytes() < whole.read_bytes() / 2


def test_other_logs_remember_nothing_once_they_are_claimed(merging: str, tmp_path: Path) -> None:
    """A start reads the log before its claim and again after it; what it remembered would take memory for ever."""
    query = Story(tmp_path, open_store=STORES[merging], file_merging=merging)
    query.run_batches(20, random.Random(1))
    store = CountedStore(STORES[merging](query.location))
    log = log_of(store, merging, remembers=False)
    log.read()
    whole = store.take().reads
    log.claim(make_claim("next"))
    claiming = store.take().reads
    log.read()
    later = store.take().reads
    assert later >= whole >= (20 if merging == "within" else 1)
    assert claiming == (0 if merging == "within" else whole + 1), claiming


def test_a_file_that_was_gone_is_read_from_its_start(tmp_path: Path) -> None:
    """A store without appends tells one from another by its length and its time."""
    store = WholeObjects(LocalStore(tmp_path))
    reader = NumberedLog(store, PREFIX, ManualClock(), appends=False, remembers=True)
    for run in ("a", "b"):
        NumberedLog(store, PREFIX, ManualClock(), appends=False).claim(make_claim(run))
        [info] = store.list(PREFIX)
        os.utime(tmp_path / info.name, ns=(0, 0))
        assert tokens(reader) == [f"{run}-1".encode()]
        store.delete([info.name])
        assert tokens(reader) == []


def test_a_longer_log_in_place_of_another_one_is_read_from_its_start(tmp_path: Path) -> None:
    query = Story(tmp_path / "query")
    query.run_batches(1, random.Random(1))
    store = LocalStore(query.location)
    log = log_of(store, "across", remembers=True)
    before = log.read()
    shutil.rmtree(tmp_path / "query")
    Story(tmp_path / "query").run_batches(3, random.Random(2))
    assert log.read() == log_of(store, "across", remembers=False).read() != before


@pytest.mark.parametrize("entries", [1, 2])
def test_an_older_copy_in_place_of_a_file_is_read_from_its_start(entries: int, tmp_path: Path) -> None:
    """It begins with the same entry, and is shorter or as long."""
    for place, token in (("here", "here"), ("copy", "copy")):
        log = NumberedLog(LocalStore(tmp_path / place), PREFIX, ManualClock(), appends=True)
        log.claim(make_claim("a"))
        for batch in range(entries if place == "copy" else 2):
            log.append(*make_checkpoint("a", 1, batch, token))
    store = LocalStore(tmp_path / "here")
    log = NumberedLog(store, PREFIX, ManualClock(), appends=True, remembers=True)
    assert tokens(log)[1:] == [b"a 1 0 here", b"a 1 1 here"]
    [info] = store.list(PREFIX)
    path = tmp_path / "here" / info.name
    path.write_bytes((tmp_path / "copy" / info.name).read_bytes())
    os.utime(path, ns=(0, 0))
    assert tokens(log)[1:] == [b"a 1 0 copy", b"a 1 1 copy"][:entries]


def test_an_entry_that_was_read_before_a_fence_cut_it_off_does_not_count(tmp_path: Path) -> None:
    """The writer does not know whether its second append has worked, and continues in the next file."""
    store = FaultStore(LocalStore(tmp_path), FaultPlan.at("append", call=2, when="after"))
    writer = NumberedLog(store, PREFIX, ManualClock(), appends=True)
    writer.claim(make_claim("a"))
    writer.append(*make_checkpoint("a", 1, 0))
    with pytest.raises(StorageError):
        writer.append(*make_checkpoint("a", 1, 1, "lost"))
    log = NumberedLog(LocalStore(tmp_path), PREFIX, ManualClock(), appends=True, remembers=True)
    assert tokens(log)[-1] == b"a 1 1 lost"
    writer.append(*make_checkpoint("a", 1, 1, "again"))
    assert tokens(log)[1:] == [b"a 1 0 ", b"a 1 1 again"]
