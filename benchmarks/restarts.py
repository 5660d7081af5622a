"""Restarts of a query whose process was killed: their parts, and their surroundings."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from benchmarks.query import Recorder, begun_s


def load_rocksdb(session: SparkSession) -> None:
    """Load the native library that Spark would load with its first state: it is not part of a state."""
    jvm: Any = session.sparkContext._jvm
    jvm.org.rocksdb.RocksDB.loadLibrary()


def restart_parts(progress: list[dict[str, Any]], recorder: Recorder, started_s: float) -> dict[str, Any]:
    """The parts of a restart of a process that was started at `started_s`, from the progress of two or more batches."""
    first, *later = progress
    first_begun_s = begun_s(first)
    first_s = first["durationMs"]["triggerExecution"] / 1000
    measured = {
        "batch": first["batchId"],
        "rows": [each["numInputRows"] for each in progress],
        "total_s": first_begun_s + first_s - started_s,
        "start_up_s": first_begun_s - started_s,
        "first_batch_s": first_s,
        "later_batch_s": statistics.median(each["durationMs"]["triggerExecution"] for each in later) / 1000,
        "log_s": 0.0,
    }
    if recorder.restores:
        (opened, opened_s), *_ = recorder.restores
        checkpoint = recorder.checkpoints[0]
        measured["log_s"] = opened.log_s
        measured["log_entries"] = opened.log_entries
        if opened_s < first_begun_s:
            measured["start_up_s"] -= opened.log_s
        measured["restore_s"] = checkpoint.restore_s
        measured["restored_bytes"] = checkpoint.restored_bytes
        measured["later_restore_s"] = statistics.median(each.restore_s for each in recorder.checkpoints[1:])
    else:
        [operator] = first["stateOperators"]
        partitions = operator["numShufflePartitions"]
        metrics = operator["customMetrics"]
        measured["restore_s"] = metrics["rocksdbLoadLatencyMs"] / 1000 / partitions
        measured["replay_s"] = metrics["rocksdbReplayChangeLogLatencyMs"] / 1000 / partitions
        measured["changelogs"] = metrics["rocksdbNumReplayChangelogFiles"] / partitions
    measured["processing_s"] = measured["total_s"] - measured["start_up_s"] - measured["log_s"] - measured["restore_s"]
    return measured


def fresh(work: Path) -> Path:
    """Make a directory anew, empty but for one for temporary files."""
    shutil.rmtree(work, ignore_errors=True)
    (work / "tmp").mkdir(parents=True)
    return work


def own_temporary_files(work: Path) -> dict[str, str]:
    """A process that is killed leaves its temporary files behind, so they are made here."""
    java = f"-Djava.io.tmpdir={work / 'tmp'} -XX:-UsePerfData"
    return {"TMPDIR": str(work / "tmp"), "JAVA_TOOL_OPTIONS": java}
