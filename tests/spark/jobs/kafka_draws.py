"""A driver program: a query that draws random numbers, from a topic of Kafka to another one, and its death."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter

from examples.sinks.kafka import KafkaSink
from statelog import Options
from tests.jars import KAFKA, spark_jars
from tests.kafka.queries import KafkaJob
from tests.spark.faults import make_marker, take_marker
from tests.spark.jobs.draws import draws
from tests.spark.jobs.ledger import note_jvm, run_main
from tests.spark.support import make_session


class Death(StrEnum):
    """Where driver, JVM and workers are killed."""

    STARTING = "while the query starts"
    BEFORE = "before an output partition's transaction is committed"
    AFTER = "when an output partition's transaction is committed"
    ANYWHERE = "at any moment"


class DyingSink(KafkaSink):
    """A sink whose workers kill the driver and the JVM around a commit.

    Parameters
    ----------
    places : tuple of str
        The broker's address, the topic and the control topic.
    death : Death
        On which side of a commit.
    marker : str
        A file that arms the death.
    victims : tuple of int
        Whom to kill.
    """

    def __init__(self, places: tuple[str, str, str], death: Death, marker: str, victims: tuple[int, ...]) -> None:
        super().__init__(*places)
        self._death = death
        self._marker = marker
        self._victims = victims

    def commit(self, producer: Producer, output: int) -> None:
        producer.flush()
        self._pass(Death.BEFORE)
        super().commit(producer, output)
        self._pass(Death.AFTER)

    def _pass(self, passed: Death) -> None:
        if passed is self._death and take_marker(self._marker):
            kill(self._victims)
            time.sleep(60)


def kill(victims: tuple[int, ...]) -> None:
    """Kill processes at once."""
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


def values(sink: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
    """A sink of rows with their users as keys, and with all columns as values."""
    return lambda rows, batch: sink(rows.selectExpr("user AS key", "to_json(struct(*)) AS value"), batch)


def draws_to_kafka(session: SparkSession, job: KafkaJob, sink: KafkaSink, parallelism: int) -> DataStreamWriter:
    """The query's writer."""
    return draws(session, job, values(sink), parallelism=parallelism, output_parallelism=parallelism, options=Options())


def main(arguments: dict[str, Any]) -> None:
    """Run the query until it dies."""
    session = make_session(settings=spark_jars(KAFKA))
    note_jvm(session, arguments)
    job = KafkaJob.at(Path(arguments["root"]), arguments["address"], tuple(arguments["topics"]))
    job = job.with_reading(arguments["reading"])
    death, rng = Death(arguments["death"]), random.Random(arguments["seed"])
    victims = (int(Path(arguments["jvm_pid_file"]).read_text()), os.getpid())
    marker = job.root / f"death-{arguments['seed']}"
    places = (arguments["address"], arguments["output"], arguments["control"])
    sink = DyingSink(places, death, str(marker), victims)

    def arm(after: Callable[[], bool], most_s: float) -> None:
        def wait() -> None:
            while not after():
                time.sleep(0.02)
            time.sleep(rng.uniform(0, most_s))
            make_marker(marker)
            if death in (Death.STARTING, Death.ANYWHERE):
                kill(victims)

        threading.Thread(target=wait, daemon=True).start()

    query = draws_to_kafka(session, job, sink, arguments["parallelism"]).start()
    arm(lambda: death is Death.STARTING or query.lastProgress is not None, 3.0 if death is Death.STARTING else 1.5)
    query.awaitTermination()


if __name__ == "__main__":
    run_main(main)
