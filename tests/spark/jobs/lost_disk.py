"""A driver program on two executors, one of which loses its local disk; what happened is written to ``story.json``."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

import statelog
from statelog import Observer, Options, Step
from statelog.coordinator.coordinator import Coordinator
from statelog.rpc.messages import Begin, Begun
from statelog.spark.driver.endpoint import require_endpoint
from tests.spark.faults import wait_until
from tests.spark.jobs.ledger import note_jvm, run_main
from tests.spark.support import Job, make_orders, make_session

PARALLELISM = 2


@dataclass(frozen=True)
class Watch(Observer):
    """Notes the local disk of each subtask that has its state."""

    folder: str

    def step(self, step: Step, batch: int, subtask: int) -> None:
        if step == Step.RESTORED:
            Path(self.folder, f"disk-{batch}-{subtask}").write_text(os.environ["SPARK_LOCAL_DIRS"].split(",")[0])


def main(arguments: dict[str, Any]) -> None:
    """Run two batches, lose a disk, go on, and start again."""
    excludes = bool(arguments["excludes"])
    settings = {
        **statelog.spark_conf(),
        "spark.executor.memory": "512m",
        "spark.excludeOnFailure.taskAndStage.enabled": str(excludes).lower(),
    }
    session = make_session("local-cluster[2,1,1024]", settings)
    note_jvm(session, arguments)
    begun = _record_begins()
    try:
        root = Path(arguments["root"])
        story = _tell(session, root, excludes=excludes) | {"begun": begun}
        Path(root, "story.json").write_text(json.dumps(story))
    finally:
        name = session.sparkContext.applicationId
        session.stop()
        shutil.rmtree(Path(pyspark.__file__).parent / "work" / name, ignore_errors=True)


def _tell(session: SparkSession, root: Path, *, excludes: bool) -> dict[str, Any]:
    job, watched = Job(root / "ledger"), root / "watched"
    watched.mkdir()
    options = Options(observer=Watch(str(watched)))
    job.add(make_orders(2, seed=1))
    query = _start(job, session, options)
    query.processAllAvailable()
    places = _places(session)
    lost = Path(Path(watched, "disk-1-0").read_text(), "statelog")
    lost.rename(f"{lost}-lost")
    lost.write_bytes(b"no directory")

    job.add(make_orders(1, seed=2))
    story: dict[str, Any] = {"lost": str(lost.parent), "failed": ""}
    if excludes:
        query.processAllAvailable()
        wait_until(lambda: set(_places(session)) == {places[1]}, "the subtasks on the other executor", 60)
    else:
        wait_until(lambda: not query.isActive, "the end of the query", 120)
        error = statelog.error_of(query)
        story["failed"] = str(error and error.kind)
        query = _start(job, session, options)
        query.processAllAvailable()
    job.add(make_orders(1, seed=3))
    query.processAllAvailable()
    query.stop()

    job.add(make_orders(1, seed=4))
    job.run(job.ledger(session, PARALLELISM, options))
    job.require_exact()
    story["disks"] = {path.name.removeprefix("disk-"): path.read_text() for path in watched.glob("disk-*")}
    return story


def _start(job: Job, session: SparkSession, options: Options) -> StreamingQuery:
    return (
        job.ledger(session, PARALLELISM, options)
        .writeStream.outputMode("update")
        .foreachBatch(job.save)
        .option("checkpointLocation", job.checkpoint_location)
        .start()
    )


def _places(session: SparkSession) -> list[str | None]:
    plan = require_endpoint(session)[1].plans()[-1]
    assert plan.placement is not None
    return plan.placement.places()


def _record_begins() -> list[tuple[int, int]]:
    """The batch and the subtask of each attempt, in the order in which they begin."""
    begun: list[tuple[int, int]] = []
    take: Callable[[Coordinator, Begin], Begun] = Coordinator.begin

    def begin(self: Coordinator, request: Begin) -> Begun:
        begun.append((request.task.batch, request.task.subtask))
        return take(self, request)

    Coordinator.begin = begin  # type: ignore[method-assign]  # only for the test
    return begun


if __name__ == "__main__":
    run_main(main)
