"""A job whose input is in topics of Kafka: which orders each batch has read is computed from what was sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.kafka.topics import SentOrders
from tests.spark.support import ORDERS, Job, Order

Places = dict[tuple[str, int], int]
"""An offset of each topic and partition."""


def read_topics(session: SparkSession, address: str, topics: tuple[str, ...], options: Mapping[str, str]) -> DataFrame:
    """Records of topics as a stream, from the earliest on unless options say otherwise."""
    reader = session.readStream.format("kafka").option("kafka.bootstrap.servers", address)
    return reader.options(**{"startingOffsets": "earliest", "subscribe": ",".join(topics), **options}).load()


@dataclass(frozen=True)
class KafkaJob(Job):
    """A job that reads orders from topics."""

    address: str = ""
    topics: tuple[str, ...] = ()
    reading: Mapping[str, str] = field(default_factory=dict)
    """Options of the source."""
    sent: SentOrders | None = None
    starts: Places = field(default_factory=dict)
    """Where the query began; at 0 where it says nothing."""
    earlier: Mapping[int, Places] = field(default_factory=dict)
    """Up to where the batches read that another query's checkpoint had."""

    def read(self, session: SparkSession, schema: str = ORDERS) -> DataFrame:
        records = read_topics(session, self.address, self.topics, self.reading)
        return records.select(F.from_json(F.col("value").cast("string"), schema).alias("order")).select("order.*")

    def batches_of_spark(self) -> list[list[Order]]:
        assert self.sent is not None
        places = {**self.earlier, **self.places()}
        ends = places[max(places)]
        assert ends == {place: end for place, end in self.sent.ends().items() if place[0] in self.topics}
        batches, start = [], self.starts
        for batch in range(len(places)):
            end = places[batch]
            orders = (self.sent.between(*place, start.get(place, 0), end[place]) for place in sorted(end))
            batches.append([order for part in orders for order in part])
            start = end
        return batches

    def places(self) -> dict[int, Places]:
        """Up to where each batch that Spark's offset log has reads."""
        found = {}
        for path in (self.checkpoint / "offsets").glob("[0-9]*"):
            by_topic = json.loads(path.read_text().splitlines()[2])
            found[int(path.name)] = {
                (topic, int(partition)): offset
                for topic, offsets in by_topic.items()
                for partition, offset in offsets.items()
            }
        return found

    def with_reading(self, options: Mapping[str, str]) -> Self:
        """The job with options of the source."""
        return replace(self, reading=options)

    def elsewhere(self, name: str) -> Self:
        job = super().elsewhere(name)
        assert isinstance(job, type(self))
        return job

    @classmethod
    def at(cls, root: Path, address: str, topics: tuple[str, ...], sent: SentOrders | None = None) -> Self:
        """A job on topics."""
        return cls(root, address=address, topics=topics, sent=sent)
