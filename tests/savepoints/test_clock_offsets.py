"""The offset log of a query whose clock source comes or goes, whenever the process dies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from statelog.errors import StorageError
from statelog.spark.checkpoint.checkpoint import DirectoryFiles, SparkCheckpoint
from statelog.spark.checkpoint.logs import BatchOffsets
from statelog.spark.driver.query_clocks import fit_clock_offsets
from statelog.storage import LocalStore

FILE = '{"logOffset":4}'


class Breaking(DirectoryFiles):
    """Fails at the n-th write or move; with `loses` a file that was to be replaced is gone then."""

    def __init__(self, root: Path, fails_at: int = 0, *, loses: bool = False) -> None:
        super().__init__(LocalStore(root), root)
        self._place = root
        self._left = fails_at
        self._loses = loses

    def write(self, name: str, data: bytes) -> None:
        self._count(name)
        super().write(name, data)

    def move(self, source: str, target: str) -> None:
        self._count(target)
        super().move(source, target)

    def _count(self, name: str) -> None:
        self._left -= 1
        if self._left == 0:
            if self._loses:
                (self._place / name).unlink(missing_ok=True)
            raise StorageError("the process dies here.")


def make(root: Path, batches: int, *lines: str) -> SparkCheckpoint:
    files = Breaking(root)
    for batch in range(batches):
        files.write(f"offsets/{batch}", entry(batch, *lines).encode())
        if batch + 1 < batches:
            files.write(f"commits/{batch}", b"v1\n{}")
    return SparkCheckpoint(files, str(root))


def entry(batch: int, *lines: str) -> str:
    return "\n".join(["v1", json.dumps({"batchTimestampMs": batch}), *lines])


def clocks(spark: SparkCheckpoint) -> list[list[str]]:
    """The ids of the clocks of each batch."""
    names = [f"offsets/{batch}" for batch in spark.batches("offsets")]
    return [BatchOffsets.parse(spark.files.read(name).decode(), name).clocks for name in names]


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("fails_at", range(1, 8))
def test_both_entries_get_the_same_clock_whenever_the_process_dies(tmp_path: Path, fails_at: int, loses: bool) -> None:
    spark = make(tmp_path, 4, FILE)
    breaking = SparkCheckpoint(Breaking(tmp_path, fails_at, loses=loses), str(tmp_path))
    if fails_at < 7:
        with pytest.raises(StorageError, match="dies here"):
            fit_clock_offsets(breaking, [False, True])
        fit_clock_offsets(spark, [False, True])
    else:
        assert fit_clock_offsets(breaking, [False, True]) == [2, 3]
    first, second, third, fourth = clocks(spark)
    assert (first, second, third) == ([], [], fourth)
    assert [bool(clock_id) for clock_id in third] == [True]
    assert fit_clock_offsets(spark, [False, True]) == []
    kept = {path.read_text() for path in (tmp_path / "statelog-replaced" / "offsets").iterdir() if path.name[0] != "."}
    assert kept == {entry(2, FILE), entry(3, FILE)}


def test_an_entry_that_was_lost_is_not_put_back_if_the_query_was_set_back_since(tmp_path: Path) -> None:
    spark = make(tmp_path, 4, FILE)
    breaking = SparkCheckpoint(Breaking(tmp_path, 5, loses=True), str(tmp_path))
    with pytest.raises(StorageError, match="dies here"):
        fit_clock_offsets(breaking, [False, True])
    assert spark.batches("offsets") == [0, 1, 2]
    for name in ("offsets/2", "commits/1", "commits/2"):
        spark.files.move(name, f"aside/{name}")
    assert fit_clock_offsets(spark, [False, True]) == [0, 1]
    assert spark.batches("offsets") == [0, 1]


def test_a_clock_goes_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "statelog")
    spark = make(tmp_path, 1, FILE, json.dumps({"clock": "id", "tick": 3}))
    assert fit_clock_offsets(spark, [False, True]) == []
    assert not caplog.messages
    assert fit_clock_offsets(spark, [False]) == [0]
    assert clocks(spark) == [[]]
    assert fit_clock_offsets(spark, [False, True]) == [0]
    assert fit_clock_offsets(spark, [False, False, True]) == [], "Spark says what is wrong"
    told = f"{tmp_path}: the clock source was {{}} the offsets of batches [0]"
    assert caplog.messages == [told.format("removed from"), told.format("added to")]


def test_a_new_query_has_nothing_to_fit(tmp_path: Path) -> None:
    assert fit_clock_offsets(make(tmp_path, 0), [False, True]) == []
