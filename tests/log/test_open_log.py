"""From the options to log and store: which files checkpoints share, when these may go, how requests are repeated."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest

import statelog
from statelog import ConfigurationError, ErrorKind, Options, StorageError, Tuning
from statelog.clock import SystemClock
from statelog.log.numbered import NumberedLog
from statelog.log.open import new_identity, open_log, open_retrying_store
from statelog.metrics import Measurements, Metric
from statelog.storage import LocalStore
from statelog.testing.query import ManualClock
from tests.contract.log_contract import make_checkpoint, make_claim
from tests.options import make_options
from tests.stores import KeptStore, WholeObjects


def opened(root: Path, clock: ManualClock | None = None, *, appends: bool = True, **options: Any) -> NumberedLog:
    store = LocalStore(root)
    made = store if appends else WholeObjects(store)
    return open_log(made, make_options(**options), clock or ManualClock())


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
    assert [info.name.split("/")[0] for info in LocalStore(tmp_path).list()] == ["log"] * (1 + files)


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


def test_an_identity_is_a_name_and_a_number_that_is_used_once() -> None:
    """Whatever the uid is, it is the name of a folder, and none that the log or the pins have."""
    first, second = (new_identity("a/b ü", bytes([number] * 16)) for number in (1, 2))
    assert first == "a%2Fb%20%C3%BC-0101010101010101"
    assert first != second
    assert new_identity("log", bytes(16)) != "log"


# ---- Stores ----


class Busy(KeptStore):
    """Two of three reads of each object fail for a moment. Notes which threads write."""

    writers: ClassVar[list[int]] = []

    def __init__(self, location: str) -> None:
        super().__init__(location.replace("busy:", "kept:"))
        self._reads: Counter[str] = Counter()

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self._reads[name] += 1
        if self._reads[name] % 3:
            raise StorageError(f"{name}: try again later.", kind=ErrorKind.STORE_BUSY)
        return super().read(name, offset=offset, length=length)

    def put(self, name: str, data: bytes | memoryview) -> None:
        self.writers.append(threading.get_ident())
        super().put(name, data)


@pytest.fixture
def recorder() -> Measurements:
    statelog.register_store("busy", Busy)
    return Measurements()


def test_requests_are_repeated_as_often_as_the_options_say_also_for_links(
    tmp_path: Path, recorder: Measurements
) -> None:
    options = Options(tuning=Tuning(upload_attempts=3, upload_retry_delay_s=0))
    store = open_retrying_store(f"busy:{tmp_path}/own", options, SystemClock(), recorder)
    for location in ("own", "other"):
        LocalStore(tmp_path / location).put("x", location.encode())
    assert store.read("x") == b"own"
    assert store.read(f"busy:{tmp_path}/other!/x") == b"other"
    assert recorder.take().counts[Metric.READ_RETRIES] == 4
    store = open_retrying_store(
        f"busy:{tmp_path}/own", Options(tuning=Tuning(upload_attempts=2)), SystemClock(), recorder
    )
    with pytest.raises(StorageError, match="try again later"):
        store.read("x")


def test_with_one_attempt_nothing_is_repeated_and_the_caller_itself_writes(
    tmp_path: Path, recorder: Measurements
) -> None:
    """A second attempt at a write would need another thread."""
    Busy.writers.clear()
    for attempts in (1, 2):
        store = open_retrying_store(
            f"busy:{tmp_path}", Options(tuning=Tuning(upload_attempts=attempts)), SystemClock(), recorder
        )
        store.put(f"{attempts}", b"x")
    own = threading.get_ident()
    assert [writer == own for writer in Busy.writers] == [True, False]
    store = open_retrying_store(f"busy:{tmp_path}", Options(tuning=Tuning(upload_attempts=1)), SystemClock(), recorder)
    with pytest.raises(StorageError, match="try again later"):
        store.read("1")


def test_a_directory_is_asked_once(tmp_path: Path, recorder: Measurements) -> None:
    """The operating system repeats whatever can be repeated."""
    assert isinstance(open_retrying_store(str(tmp_path), Options(), SystemClock(), recorder).own, LocalStore)
    assert not isinstance(open_retrying_store(f"busy:{tmp_path}", Options(), SystemClock(), recorder).own, Busy)
