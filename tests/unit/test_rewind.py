"""Rewind on files as Spark leaves them, without Spark."""

from __future__ import annotations

from pathlib import Path

import pytest

import statelog
from statelog import ConfigurationError, StateMissingError
from tests.model.engine import Engine


def spark_checkpoint(root: Path, offsets: range, commits: range) -> None:
    for folder, batches in (("offsets", offsets), ("commits", commits)):
        (root / folder).mkdir(parents=True)
        for batch in batches:
            (root / folder / str(batch)).write_text("v1")
            (root / folder / f".{batch}.crc").write_text("crc")


def state(directory: Path, batches: int) -> str:
    engine = Engine(directory, lambda key: 0)
    engine.start(1, 0)
    for batch in range(batches):
        engine.run_commands(batch, 0, [((1, None), ("set", batch))])
    engine.coordinator.close()
    return engine.location


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_commits_without_state_are_taken_back(tmp_path: Path, scheme: str) -> None:
    root = tmp_path / "odd %41#name"
    spark_checkpoint(root, range(5), range(4))
    location = state(root, 2)
    planned = statelog.rewind(f"{scheme}{root}", location=location, dry_run=True)
    assert (root / "commits" / "3").exists(), "a dry run changes nothing"
    assert statelog.rewind(f"{scheme}{root}", location=location) == planned
    assert planned.next_batch == 2
    assert planned.taken_back == [2, 3]
    assert planned.removed == ["offsets/4", "offsets/3", "commits/3", "commits/2"]
    assert {path.name for path in (root / "offsets").iterdir()} == {"0", "1", "2", ".0.crc", ".1.crc", ".2.crc"}
    assert {path.name for path in (root / "commits").iterdir()} == {"0", "1", ".0.crc", ".1.crc"}


def test_nothing_is_done_when_spark_and_the_state_agree(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(4), range(3))
    done = statelog.rewind(tmp_path, location=state(tmp_path, 3))
    assert (done.next_batch, done.taken_back, done.removed) == (3, [], [])


def test_input_that_spark_forgot_is_an_error(tmp_path: Path) -> None:
    spark_checkpoint(tmp_path, range(5, 9), range(5, 9))
    with pytest.raises(StateMissingError, match="no longer knows the input of batch 2: its oldest is 5"):
        statelog.rewind(tmp_path, location=state(tmp_path, 2))
    assert len(list((tmp_path / "commits").iterdir())) == 8


def test_a_wrong_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no checkpoint of a Spark query"):
        statelog.rewind(tmp_path)
    spark_checkpoint(tmp_path, range(4), range(3))
    with pytest.raises(ConfigurationError, match="holds no state of statelog"):
        statelog.rewind(tmp_path)
