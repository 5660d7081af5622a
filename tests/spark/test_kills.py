"""SIGKILL at every point that matters: run, kill, run again with another parallelism, compare.

Workers are killed in the shared session, whose tasks have one attempt; drivers and JVMs are processes of
their own, and what they leave behind is taken over by the shared session.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from statelog import Options, Step, Tuning
from statelog.spark.driver.internals import CHECKPOINT_FILES
from statelog.spark.plan.placement import CHECKPOINT_MANAGER
from tests.spark.faults import KillAt, make_marker, wait_until
from tests.spark.support import Job, Ledger, make_orders, start_driver

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("step", "inline_bytes"),
    [
        (Step.RESTORED, 8 << 20),
        (Step.ACKING, 0),
        (Step.ACKED, 8 << 20),
        (Step.MERGING, 0),
        (Step.MATERIALIZING, 8 << 20),
        (Step.MATERIALIZING, 0),
    ],
)
def test_a_worker_killed_at_a_step_loses_nothing(
    spark: SparkSession, tmp_path: Path, step: Step, inline_bytes: int
) -> None:
    job = Job(tmp_path).add(make_orders(5, seed=3))
    kill = KillAt(step, 3, make_marker(tmp_path / "kill"))
    options = Options(
        inline_budget_bytes=inline_bytes,
        materialization_interval_s=0,
        tuning=Tuning(merge_fan_in=2, orphan_min_age_s=0),
    )

    text = job.fail(job.ledger(spark, 2, replace(options, observer=kill)))
    assert "Python worker exited unexpectedly" in text
    job.run(job.ledger(spark, 3, options))

    job.require_exact()


def test_local_files_of_a_killed_executor_are_removed(tmp_path: Path) -> None:
    """Of a JVM that runs tasks itself; its successor has another scratch directory."""
    job = Job(tmp_path).add(make_orders(3, seed=6))
    scratch, stalled, go_on = tmp_path / "scratch", tmp_path / "stalled", tmp_path / "go-on"
    arguments, env = {"parallelism": 2}, {"SPARK_LOCAL_DIRS": str(scratch)}
    stall = {"at": Step.LAST_ACK, "batch": 1, "stalled": str(stalled), "go_on": str(go_on)}
    driver = start_driver("ledger", tmp_path, {**arguments, "stall": stall}, env)
    wait_until(stalled.exists, "the driver to stall")
    left = list(scratch.glob("blockmgr-*/statelog/*/*/2/*.used"))
    assert len(left) == 2
    os.kill(int(driver.jvm_pid_file.read_text()), signal.SIGKILL)
    go_on.touch()
    driver.wait()
    wait_until(lambda: all(map(is_unlocked, left)), "the workers of the killed JVM to end")
    assert all(path.exists() for path in left)

    driver = start_driver("ledger", tmp_path, arguments, env)
    assert driver.wait() == 0, driver.end
    assert not any(path.exists() for path in left)
    job.require_exact()


def is_unlocked(path: Path) -> bool:
    """Whether no task works in the directory whose use a file marks."""
    with path.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_worker_killed_in_user_code_loses_nothing(spark: SparkSession, tmp_path: Path) -> None:
    job = Job(tmp_path).add(make_orders(2, seed=4))
    job.run(job.ledger(spark, 3))

    job.add(make_orders(2, seed=5))
    text = job.fail(job.ledger(spark, 3, processor=Ledger(make_marker(tmp_path / "poison"))))
    assert "Python worker exited unexpectedly" in text
    job.run(job.ledger(spark, 1))

    job.require_exact()


def test_workers_that_spark_replaces_lose_nothing(tmp_path: Path) -> None:
    """With several attempts per task the query survives its workers."""
    job = Job(tmp_path).add(make_orders(8, seed=6))
    points = [(Step.ACKING, 1), (Step.MERGING, 3), (Step.ACKED, 4), (Step.RESTORED, 5), (Step.MERGING, 6)]
    kills = [{"at": step, "batch": batch, "marker": make_marker(tmp_path / f"kill-{batch}")} for step, batch in points]
    driver = start_driver(
        "ledger",
        tmp_path,
        {
            "master": "local[2,4]",
            "parallelism": 3,
            "kills": kills,
            "poison": make_marker(tmp_path / "poison"),
            "options": {"merge_fan_in": 2},
        },
    )

    assert driver.wait() == 0, driver.end
    assert not list(tmp_path.glob("kill-*")), "some fault did not happen"
    assert not (tmp_path / "poison").exists()
    job.require_exact()


@pytest.mark.parametrize(
    ("victim", "step", "file_merging"),
    [
        ("driver", Step.LAST_ACK, "across"),
        pytest.param("driver", Step.DURABLE, "across", marks=pytest.mark.smoke),
        pytest.param("driver", Step.DURABLE, "within", marks=pytest.mark.extended),
        pytest.param("jvm", Step.LAST_ACK, "within", marks=pytest.mark.extended),
        ("jvm", Step.DURABLE, "across"),
    ],
)
def test_a_driver_killed_around_the_log_entry_loses_nothing(
    spark: SparkSession, tmp_path: Path, victim: str, step: Step, file_merging: str
) -> None:
    job = Job(tmp_path).add(make_orders(5, seed=7))
    pid_file = str(tmp_path / "jvm-0.pid") if victim == "jvm" else ""
    kill = {"at": step, "batch": 2, "marker": make_marker(tmp_path / "kill"), "pid_file": pid_file}
    arguments = {"parallelism": 2, "kills": [kill], "options": {"file_merging": file_merging}}

    driver = start_driver("ledger", tmp_path, arguments)
    assert driver.wait() == (-signal.SIGKILL if victim == "driver" else 1), driver.end
    assert "kill" not in {path.name for path in tmp_path.iterdir()}
    assert max(job.results()) == 1
    job.run(job.ledger(spark, 3))
    job.add(make_orders(1, seed=8))
    job.run(job.ledger(spark, 2))

    job.require_exact()


def test_kills_at_any_moment_lose_nothing(spark: SparkSession, tmp_path: Path) -> None:
    """With materialization after every batch in both lives, and in one of them without a changelog.

    In that one Spark also writes its files as it is faster in a directory, without a process to read links with.
    """
    job, seed, links = Job(tmp_path), 11, tmp_path / "links"
    default = {CHECKPOINT_MANAGER: f"{CHECKPOINT_FILES}.FileContextBasedCheckpointFileManager"}
    program = tmp_path / "bin" / "readlink"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> {links}\nexec {shutil.which("readlink")} "$@"\n')
    program.chmod(0o755)
    env = {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}
    for life in range(2):
        links.write_text("")
        job.add(make_orders(12, seed=100 * seed + life, rows=60))
        arguments = {
            "parallelism": 1 + (seed + life) % 3,
            "kill_seed": 10 * seed + life,
            "settings": default if life else {},
            "options": {
                "merge_fan_in": 2,
                "inline_budget_bytes": 0 if life else 8 << 20,
                "materialization_interval_s": 0,
                "retained_checkpoints": 2,
                "changelog": (seed + life) % 2 == 0,
            },
        }
        assert start_driver("ledger", tmp_path, arguments, env).wait() != 0, "nothing was killed"
        assert (str(job.checkpoint) in links.read_text()) == (life != 0)
    job.run(job.ledger(spark, 4))

    job.require_exact()
