"""A driver program: the ledger query, with a fault if one is wanted."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from statelog import Observer
from tests.options import make_options
from tests.spark.faults import KillAt, KillAtMany, StallAt, wait_until
from tests.spark.file_systems import mount
from tests.spark.support import Job, Ledger, make_session


def main(arguments: dict[str, Any]) -> None:
    """Run the query over all input that is there."""
    root = Path(arguments["root"])
    place = mount(arguments["scheme"], root) if arguments.get("scheme") else None
    settings = dict(arguments.get("settings", {}))
    settings |= {} if place is None else {f"spark.hadoop.{name}": value for name, value in place.settings.items()}
    session = make_session(arguments.get("master", "local[2]"), settings)
    note_jvm(session, arguments)
    job = Job(root, arguments.get("uid"), arguments.get("location"), mount=place)
    options = make_options(observer=_observer(arguments), **arguments.get("options", {}))
    df = job.ledger(session, arguments["parallelism"], options, Ledger(arguments.get("poison", "")))
    if "kill_seed" in arguments:
        _kill_sometime(random.Random(arguments["kill_seed"]), job, arguments["jvm_pid_file"])
    if "progress_interval_ms" in arguments:
        run_asynchronously(job, df, arguments["progress_interval_ms"])
    else:
        job.run(df, partial(_save, job, arguments.get("actions", 1)))


def run_asynchronously(job: Job, df: DataFrame, interval_ms: int) -> None:
    """Run a query over all input that is there, with asynchronous progress; its output is dropped."""
    query = (
        df.writeStream.format("noop")
        .option("checkpointLocation", job.checkpoint_location)
        .option("asyncProgressTrackingEnabled", "true")
        .option("asyncProgressTrackingCheckpointIntervalMs", str(interval_ms))
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        query.processAllAvailable()
    finally:
        query.stop()


def _save(job: Job, actions: int, df: DataFrame, batch: int) -> None:
    """Write the output of a batch, which the last of several actions has asked for."""
    for _ in range(actions - 1):
        df.count()
    job.save(df, batch)


def note_jvm(session: SparkSession, arguments: dict[str, Any]) -> None:
    """Write down the JVM's process id."""
    jvm: Any = session._jvm
    Path(arguments["jvm_pid_file"]).write_text(str(jvm.java.lang.ProcessHandle.current().pid()))


def _observer(arguments: dict[str, Any]) -> Observer:
    if "stall" in arguments:
        return StallAt(**arguments["stall"])
    return KillAtMany(tuple(KillAt(**fault) for fault in arguments.get("kills", [])))


def _kill_sometime(rng: random.Random, job: Job, jvm_pid_file: str) -> None:
    """Kill this process or the JVM some batches and some milliseconds from now."""
    done = len(list(job.output.glob("*"))) + rng.randrange(1, 8)
    delay_s = rng.uniform(0, 0.6)
    victim = os.getpid() if rng.random() < 0.5 else int(Path(jvm_pid_file).read_text())

    def kill() -> None:
        wait_until(lambda: len(list(job.output.glob("*"))) >= done, "some batches")
        time.sleep(delay_s)
        os.kill(victim, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def run_main(entry: Any) -> None:
    """Run a driver program; nothing of it may outlive a failure."""
    try:
        entry(json.loads(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run_main(main)
