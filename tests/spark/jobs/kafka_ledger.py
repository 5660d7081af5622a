"""A driver program: the ledger query on topics of Kafka, killed at a step of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from statelog import Options
from tests.jars import KAFKA, spark_jars
from tests.kafka.queries import KafkaJob
from tests.spark.faults import KillAt
from tests.spark.jobs.ledger import note_jvm, run_main
from tests.spark.support import make_session


def main(arguments: dict[str, Any]) -> None:
    """Run the query over all records that are there."""
    session = make_session(settings=spark_jars(KAFKA))
    note_jvm(session, arguments)
    job = KafkaJob.at(Path(arguments["root"]), arguments["address"], tuple(arguments["topics"]))
    job = job.with_reading(arguments["reading"])
    job.run(job.ledger(session, arguments["parallelism"], Options(observer=KillAt(**arguments["kill"]))))


if __name__ == "__main__":
    run_main(main)
