"""Topics of a broker, by the Kafka clients that the Spark session has: made, written to, and read whole."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from py4j.java_gateway import JavaMember
from py4j.protocol import STATIC_PREFIX
from pyspark.sql import SparkSession

from tests.spark.faults import wait_until
from tests.spark.support import Order

_POLL_MS: Final = 200
COMPACTED_AT_ONCE: Final = {
    "cleanup_policy": "compact",
    "segment_ms": "1",
    "min_cleanable_dirty_ratio": "0",
    "delete_retention_ms": "0",
}
"""Settings of a topic in which a record begins a new file of the log, and all files before it are compacted."""
_STRING: Final = "org.apache.kafka.common.serialization.String"


@dataclass(frozen=True)
class Record:
    """A record, with its place if it has been read; a value of None is a tombstone."""

    topic: str
    partition: int
    key: str | None
    value: str | None
    headers: tuple[tuple[str, bytes], ...] = ()
    offset: int = -1


class Topics:
    """The topics of a broker.

    Parameters
    ----------
    spark : SparkSession
        It has the connector's jars.
    address : str
        Of the broker.
    """

    def __init__(self, spark: SparkSession, address: str) -> None:
        jvm: Any = spark._jvm
        self._jvm = jvm
        self.address = address
        self._clients = jvm.org.apache.kafka.clients
        self._admin = self._clients.admin.AdminClient.create(self._settings())
        # The broker may refuse the first request for a new topic and take the next: the first is out of sequence then.
        in_turn = {"max.in.flight.requests.per.connection": "1"}
        strings = {"key.serializer": f"{_STRING}Serializer", "value.serializer": f"{_STRING}Serializer"}
        self._producer = self._clients.producer.KafkaProducer(self._settings({**in_turn, **strings}))
        self._names = itertools.count(1)

    def close(self) -> None:
        """Close its connections."""
        self._producer.close()
        self._admin.close()

    def create(self, partitions: int = 1, **settings: str) -> str:
        """Make a topic, and return its name; in the names of settings ``_`` is a dot."""
        name = f"topic-{next(self._names)}"
        topic = self._clients.admin.NewTopic(name, partitions, 1)
        topic.configs(self._map({key.replace("_", "."): value for key, value in settings.items()}))
        self._admin.createTopics(self._list([topic])).all().get()
        return name

    def grow(self, topic: str, partitions: int) -> None:
        """Add partitions, up to a number."""
        grown = self._clients.admin.NewPartitions.increaseTo(partitions)
        self._admin.createPartitions(self._map({topic: grown})).all().get()

    def lose(self, topic: str, partition: int, before: int) -> None:
        """Delete the records of a partition in front of an offset, as retention does."""
        # Py4J does not find a static method that shares its name with another one.
        owner = self._clients.admin.RecordsToDelete
        limit = JavaMember("beforeOffset", None, STATIC_PREFIX + owner._fqn, owner._gateway_client)(before)
        self._admin.deleteRecords(self._map({self._partition(topic, partition): limit})).all().get()

    def send(self, records: Iterable[Record]) -> list[int]:
        """Send records in order, and return their offsets."""
        header = self._jvm.org.apache.kafka.common.header.internals.RecordHeader
        sent = []
        for record in records:
            headers = self._list([header(name, value) for name, value in record.headers])
            place = (record.topic, record.partition, None, record.key, record.value, headers)
            sent.append(self._producer.send(self._clients.producer.ProducerRecord(*place)))
        return [answer.get().offset() for answer in sent]

    def read(self, topic: str, isolation: str = "read_committed") -> list[Record]:
        """All records that a consumer of an isolation level gets now, by partition and offset."""
        strings = {"key.deserializer": f"{_STRING}Deserializer", "value.deserializer": f"{_STRING}Deserializer"}
        consumer = self._clients.consumer.KafkaConsumer(self._settings({**strings, "isolation.level": isolation}))
        try:
            number = consumer.partitionsFor(topic).size()
            partitions = [self._partition(topic, index) for index in range(number)]
            consumer.assign(self._list(partitions))
            ends = consumer.endOffsets(self._list(partitions))
            consumer.seekToBeginning(self._list(partitions))
            found = []
            while any(consumer.position(partition) < ends[partition] for partition in partitions):
                polled = consumer.poll(self._jvm.java.time.Duration.ofMillis(_POLL_MS))
                found += [record for partition in partitions for record in polled.records(partition)]
            records = [
                Record(topic, one.partition(), one.key(), one.value(), offset=one.offset())
                for one in found
                if one.offset() < ends[self._partition(topic, one.partition())]
            ]
        finally:
            consumer.close()
        return sorted(records, key=lambda record: (record.partition, record.offset))

    def wait_for_compaction(self, topic: str, of: str) -> None:
        """Wait until no partition of a topic has two records of a key, other than `of`, which it sends to each."""

        def is_compacted() -> bool:
            self.send(Record(topic, partition, of, "begins a file") for partition in partitions)
            found = [(record.partition, record.key) for record in self.read(topic) if record.key != of]
            return len(found) == len(set(found))

        partitions = range(self._producer.partitionsFor(topic).size())
        wait_until(is_compacted, f"the compaction of {topic}")

    def _settings(self, more: Mapping[str, str] | None = None) -> Any:
        return self._map({"bootstrap.servers": self.address, **(more or {})})

    def _partition(self, topic: str, partition: int) -> Any:
        return self._jvm.org.apache.kafka.common.TopicPartition(topic, partition)

    def _map(self, entries: Mapping[Any, Any]) -> Any:
        made = self._jvm.java.util.HashMap()
        for key, value in entries.items():
            made.put(key, value)
        return made

    def _list(self, elements: Sequence[Any]) -> Any:
        made = self._jvm.java.util.ArrayList()
        for element in elements:
            made.add(element)
        return made


class SentOrders:
    """Orders that were sent, by topic and partition: an offset is a position in the list."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._orders: dict[tuple[str, int], list[Order]] = defaultdict(list)
        self._lost: dict[tuple[str, int], range] = defaultdict(lambda: range(0))

    def send(self, places: Sequence[tuple[str, int]], orders: Iterable[Order]) -> None:
        """Send orders to topics and partitions in turn."""
        chosen = list(zip(itertools.cycle(places), orders))
        expected = []
        for place, order in chosen:
            expected.append(len(self._orders[place]))
            self._orders[place].append(order)
        records = (Record(*place, key=order["user"], value=json.dumps(order)) for place, order in chosen)
        assert self._topics.send(records) == expected

    def lose(self, topic: str, partition: int, before: int, *, read: int) -> None:
        """Have the broker delete the orders in front of an offset; those before `read` are read already."""
        self._topics.lose(topic, partition, before)
        self._lost[topic, partition] = range(read, before)

    def between(self, topic: str, partition: int, start: int, end: int) -> list[Order]:
        """The orders from one offset up to another, without those that are lost."""
        lost = self._lost[topic, partition]
        orders = self._orders[topic, partition]
        return [orders[offset] for offset in range(start, end) if offset not in lost]

    def ends(self) -> dict[tuple[str, int], int]:
        """The number of orders that each topic and partition has got."""
        return {place: len(orders) for place, orders in self._orders.items()}
