"""Locations: two drivers on one, state of somebody else, state that Spark disagrees with, damaged files."""

from __future__ import annotations

import random
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import statelog
from statelog import ConfigurationError, ErrorKind, Options, Step
from tests.spark.faults import wait_until
from tests.spark.support import Job, Ledger, make_orders, start_driver

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]


def log_files(job: Job) -> list[Path]:
    return sorted((job.state / "log").iterdir())


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- Two drivers ----


@pytest.mark.parametrize(
    ("checkpoint", "file_merging"), [("same", "across"), pytest.param("copied", "within", marks=pytest.mark.extended)]
)
def test_the_older_of_two_drivers_stops_and_its_late_commit_has_no_effect(
    spark: SparkSession, tmp_path: Path, checkpoint: str, file_merging: str
) -> None:
    job = Job(tmp_path, location=str(tmp_path / "state")).add(make_orders(5, seed=41))
    stalled, go_on = tmp_path / "stalled", tmp_path / "go-on"
    stall = {"at": Step.LAST_ACK, "batch": 2, "stalled": str(stalled), "go_on": str(go_on)}
    older = start_driver(
        "ledger",
        tmp_path,
        {
            "parallelism": 2,
            "stall": stall,
            "location": job.location,
            "options": {"file_merging": file_merging},
            "master": "local[2,1000000]",  # it ends although its tasks may be tried again
        },
    )
    newer = job
    try:
        wait_until(stalled.exists, "the older driver to stall")
        if checkpoint == "copied":
            newer = job.elsewhere("newer")
            shutil.copytree(job.checkpoint, newer.checkpoint)
            shutil.copytree(job.output, newer.output)
        newer.run(newer.ledger(spark, 3))
        newer.require_exact()
    finally:
        go_on.touch()
        code = older.wait()
    assert code == 1
    assert "FencedError" in older.text
    assert "[newer-epoch]" in older.text
    assert "only one run of a query can write to a location" in older.text

    job.add(make_orders(2, seed=42))
    newer.run(newer.ledger(spark, 2))
    newer.require_exact()


# ---- Somebody else's state ----


class OtherLedger(Ledger):
    """Declares one of the states as another kind."""

    def init(self, handle: Any) -> None:
        self._account = handle.getListState("account", "count long, amount long")
        self._history = handle.getListState("history", "amount long")
        self._items = handle.getMapState("items", "item string", "count long")


def test_a_location_of_other_keys_or_states_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(2, seed=43))
    job.run(job.ledger(spark, 2))
    job.add(make_orders(1, seed=44))
    before = files_of(job.state)

    text = job.fail(job.ledger(spark, 2, keys=("user", "item")))
    assert "[other-schema]" in text
    assert "keyed by (user string), but this query by (user string, item string)" in text
    text = job.fail(job.ledger(spark, 2, processor=OtherLedger()))
    assert "[other-schema]" in text
    assert "value state 'account' (count int64, amount int64)" in text
    assert "list state 'account' (count int64, amount int64)" in text
    assert files_of(job.state) == before
    job.run(job.ledger(spark, 2))

    job.require_exact()


def test_another_uid_is_refused_and_told_the_old_one(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path, uid="orders").add(make_orders(2, seed=45))
    job.run(job.ledger(spark, 2))
    job.add(make_orders(1, seed=46))

    renamed = Job(tmp_path, uid="order")
    text = renamed.fail(renamed.ledger(spark, 2))
    assert "at batch 1 the query also has an operator 'orders', which this start lacks" in text
    assert "If the uid was changed, use 'orders'" in text
    job.run(job.ledger(spark, 2))

    job.require_exact()


def test_a_location_of_another_query_is_refused_and_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path, location=str(tmp_path / "state")).add(make_orders(2, seed=47))
    job.run(job.ledger(spark, 2))
    before = files_of(job.state)

    other = job.elsewhere("other")
    text = other.fail(other.ledger(spark, 2))
    assert "[other-owner]" in text
    assert "Give this query another location" in text
    assert files_of(job.state) == before
    job.add(make_orders(1, seed=48))
    job.run(job.ledger(spark, 3))

    job.require_exact()


def test_a_copied_checkpoint_does_not_go_on_with_the_state_of_the_other_copy(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Both copies have Spark's query id and one location; the batch times tell them apart."""
    job = Job(tmp_path, location=str(tmp_path / "state")).add(make_orders(2, seed=51))
    job.run(job.ledger(spark, 2))
    copy = job.elsewhere("copy")
    shutil.copytree(job.checkpoint, copy.checkpoint)
    shutil.copytree(job.output, copy.output)
    job.add(make_orders(1, seed=52))
    job.run(job.ledger(spark, 2))
    copy.run(copy.ledger(spark, 2))
    copy.require_exact()
    job.add(make_orders(1, seed=53))
    before = files_of(job.state)

    text = job.fail(job.ledger(spark, 2))
    assert "[other-owner]" in text
    assert "another copy of the query wrote it" in text
    assert files_of(job.state) == before
    copy.run(copy.ledger(spark, 2))

    copy.require_exact()


# ---- Spark's checkpoint and the state disagree ----


def test_a_deleted_state_is_an_error_and_a_copy_repairs_it(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(2, seed=49))
    job.run(job.ledger(spark, 2))
    state = job.checkpoint / "statelog"
    state.rename(tmp_path / "copy")
    job.add(make_orders(1, seed=50))

    text = job.fail(job.ledger(spark, 2))
    assert "[checkpoint-missing]" in text
    assert "batch 2, which needs checkpoint 1, but there is no checkpoint" in text
    with pytest.raises(ConfigurationError, match="holds no state"):
        statelog.rewind(job.checkpoint)
    shutil.rmtree(state, ignore_errors=True)
    (tmp_path / "copy").rename(state)
    job.run(job.ledger(spark, 2))

    job.require_exact()


@pytest.mark.parametrize("parallelism", [2, 3])
def test_an_older_copy_of_the_state_is_an_error_and_rewind_repairs_it(
    spark: SparkSession, tmp_path: Path, parallelism: int
) -> None:
    job = Job(tmp_path).add(make_orders(2, seed=51))
    job.run(job.ledger(spark, 2))
    state = job.checkpoint / "statelog"
    shutil.copytree(state, tmp_path / "copy")
    job.add(make_orders(2, seed=52))
    job.run(job.ledger(spark, 2))
    shutil.rmtree(state)
    (tmp_path / "copy").rename(state)
    job.add(make_orders(2, seed=53))

    text = job.fail(job.ledger(spark, parallelism))
    assert "[checkpoint-missing]" in text
    assert "batch 4, which needs checkpoint 3, but the newest is checkpoint 1" in text
    plan = statelog.rewind(job.checkpoint, dry_run=True)
    assert statelog.rewind(str(job.checkpoint)) == plan
    assert (plan.next_batch, plan.taken_back) == (2, [2, 3])
    job.run(job.ledger(spark, parallelism))

    job.require_exact()


def test_an_older_copy_of_spark_s_checkpoint_repeats_the_batches(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path, location=str(tmp_path / "state")).add(make_orders(2, seed=54))
    job.run(job.ledger(spark, 2))
    shutil.copytree(job.checkpoint, tmp_path / "copy")
    job.add(make_orders(2, seed=55))
    job.run(job.ledger(spark, 2))
    shutil.rmtree(job.checkpoint)
    (tmp_path / "copy").rename(job.checkpoint)

    job.run(job.ledger(spark, 3))
    job.add(make_orders(1, seed=56))
    job.run(job.ledger(spark, 2))

    job.require_exact()


# ---- Damaged files ----


def flip_a_bit(path: Path, at: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def run_in_three_epochs(spark: SparkSession, job: Job, options: Options | None = None) -> None:
    for seed in (57, 58, 59):
        job.add(make_orders(1, seed=seed))
        job.run(job.ledger(spark, 2, options))
    job.add(make_orders(1, seed=60))


def test_a_flipped_bit_is_an_error_that_names_file_and_offset(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path)
    run_in_three_epochs(spark, job)
    rng = random.Random(61)
    for path in log_files(job):
        healthy = path.read_bytes()
        at = rng.randrange(len(healthy))
        flip_a_bit(path, at, rng.randrange(8))
        text = job.fail(job.ledger(spark, 3))
        assert "CorruptionError" in text, f"{path.name}, byte {at} of {len(healthy)}"
        assert path.name in text
        assert "offset" in text
        path.write_bytes(healthy)
    job.run(job.ledger(spark, 3))

    job.require_exact()


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete"])
def test_a_damaged_upload_is_an_error_that_names_it(spark: SparkSession, tmp_path: Path, harm: str) -> None:
    job = Job(tmp_path)
    options = Options(inline_budget_bytes=0)
    run_in_three_epochs(spark, job, options)
    path = sorted(job.state.glob("*/changes/**/*.run"))[2]
    healthy = path.read_bytes()
    if harm == "flip":
        flip_a_bit(path, len(healthy) // 2)
    elif harm == "truncate":
        path.write_bytes(healthy[:-7])
    else:
        path.unlink()

    text = job.fail(job.ledger(spark, 3, options))
    assert "CorruptionError" in text
    assert path.name in text
    assert "offset 0" in text
    assert "Restore the file from a copy" in text
    path.write_bytes(healthy)
    job.run(job.ledger(spark, 3, options))

    job.require_exact()


@pytest.mark.parametrize(
    ("file_merging", "missing"), [("across", [1]), ("within", [2]), ("across", [0]), ("within", [0, 1])]
)
def test_missing_log_files_are_an_error_that_says_so(
    spark: SparkSession, tmp_path: Path, file_merging: str, missing: list[int]
) -> None:
    """Between others, or the oldest, which hold the first checkpoint."""
    job = Job(tmp_path)
    options = Options(file_merging=file_merging)
    run_in_three_epochs(spark, job, options)
    paths = [log_files(job)[index] for index in missing]
    copies = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.unlink()

    text = job.fail(job.ledger(spark, 3, options))
    for path, data in copies.items():
        path.write_bytes(data)
    assert "CorruptionError" in text, text.rpartition("statelog.errors.")[2][:500]
    assert "from a copy" in text
    job.run(job.ledger(spark, 3, options))

    job.require_exact()


def test_a_log_file_of_an_older_epoch_that_was_cut_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path)
    run_in_three_epochs(spark, job)
    path = log_files(job)[1]
    healthy = path.read_bytes()
    path.write_bytes(healthy[:-5])

    text = job.fail(job.ledger(spark, 2))
    assert "CorruptionError" in text
    assert path.name in text
    assert "Restore the file from a copy" in text
    path.write_bytes(healthy)
    job.run(job.ledger(spark, 2))

    job.require_exact()


def test_a_newest_log_file_that_lost_a_commit_is_an_error_and_rewind_repairs_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    job = Job(tmp_path)
    run_in_three_epochs(spark, job)
    path = log_files(job)[2]
    path.write_bytes(path.read_bytes()[:-5])

    text = job.fail(job.ledger(spark, 3))
    assert "batch 3, which needs checkpoint 2, but the newest is checkpoint 1" in text
    assert statelog.rewind(job.checkpoint).next_batch == 2
    job.run(job.ledger(spark, 3))

    job.require_exact()


@pytest.mark.parametrize("tail", ["half an entry", "zeros"])
def test_a_torn_tail_is_no_error(spark: SparkSession, tmp_path: Path, tail: str) -> None:
    job = Job(tmp_path)
    run_in_three_epochs(spark, job)
    path = log_files(job)[2]
    data = path.read_bytes()
    # What a kill in the middle of an append leaves: the start of a frame, here of one that exists.
    path.write_bytes(data + (bytes(5000) if tail == "zeros" else data[:40]))
    job.run(job.ledger(spark, 3))
    job.add(make_orders(1, seed=62))
    job.run(job.ledger(spark, 2))

    job.require_exact()


def test_a_damaged_local_copy_is_fetched_again(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path)
    local = tmp_path / "local"
    options = Options(local_directory=str(local))
    job.add(make_orders(2, seed=63))
    job.run(job.ledger(spark, 2, options))
    copies = sorted(local.rglob("*.run"))
    assert len(copies) >= 4
    flip_a_bit(copies[0], copies[0].stat().st_size // 2)
    copies[1].write_bytes(copies[1].read_bytes()[:-1])
    copies[2].unlink()
    job.add(make_orders(1, seed=64))
    job.run(job.ledger(spark, 2, options))

    job.require_exact()


# ---- Places that are not what they seem ----


@pytest.mark.parametrize("has_other_state", [False, True])
def test_a_directory_that_workers_do_not_share_is_refused_in_the_first_batch(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_other_state: bool
) -> None:
    """The path leads the driver and the workers, which have other working directories, to different directories."""
    job = Job(tmp_path, location=f"/proc/self/cwd/{tmp_path.name}-state").add(make_orders(2, seed=65))
    workers_directory = Path(tmp_path.name + "-state").absolute()
    if has_other_state:
        earlier = job.elsewhere("earlier")
        other = replace(earlier, location=str(workers_directory))
        other.run(other.ledger(spark, 2))
    monkeypatch.chdir(tmp_path)
    try:
        query = job.start(job.ledger(spark, 2))
        with pytest.raises(StreamingQueryException) as failure:
            query.awaitTermination()
    finally:
        shutil.rmtree(workers_directory, ignore_errors=True)
    error = statelog.error_of(failure.value)
    assert isinstance(error, ConfigurationError)
    assert error.kind is ErrorKind.LOCATION_NOT_SHARED
    seen = "sees a different object in place of" if has_other_state else "does not see"
    assert f"batch 0: host {socket.gethostname()} {seen} log/" in error.message
    assert "all executors mount under one path" in error.hint
    assert not (job.checkpoint / "commits" / "0").exists()


def test_a_relative_location_is_the_driver_s(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path, location="state").add(make_orders(2, seed=66))
    monkeypatch.chdir(tmp_path)
    as_path: Any = Path("state")
    job.run(replace(job, location=as_path).ledger(spark, 2))
    job.add(make_orders(1, seed=67))
    job.run(job.ledger(spark, 3))

    job.require_exact()
    assert (tmp_path / "state" / "log").is_dir()
