"""Kafka: the batch id is sent to a control topic in the transaction that sends the batch's records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, OffsetSpec, ResourceType
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

__all__ = ["Delivered", "KafkaSink"]

_TIMEOUT_S: Final = 60.0
_LAST_OFFSETS: Final = 256
"""So many are read back at first: one batch takes two, of the record and of the transaction's end."""


@dataclass(frozen=True)
class Delivered:
    """What a partition of the control topic says of a query.

    Parameters
    ----------
    batch : int
        The newest batch whose records of this output partition are committed.
    outputs : int
        The number of output partitions that the batch had.
    """

    batch: int
    outputs: int


class KafkaSink:
    """A function for ``statelog.write_ahead`` that sends rows to a topic, once for readers of committed records.

    The rows have the columns ``key`` and ``value``, strings or binary. They are sent by tasks, in one transaction for
    each output partition; a key is always of the same one.

    Parameters
    ----------
    servers : str
        ``bootstrap.servers`` of the brokers.
    topic, control : str
        The topic of the records; and the topic of the batch ids, which is compacted and has a partition for each
        output partition. Both exist.
    settings : mapping, optional
        More settings of the clients, as librdkafka names them, such as ``security.protocol``.
    """

    def __init__(self, servers: str, topic: str, control: str, settings: Mapping[str, str] | None = None) -> None:
        self._topic = topic
        self._control = control
        self._settings = {**(settings or {}), "bootstrap.servers": servers}
        self._outputs = 0

    def __call__(self, rows: DataFrame, batch: int) -> None:
        query = rows.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        assert query is not None, "in a streaming query only"
        self._outputs = self._outputs or self._check(query)
        records = rows.select(F.col("key").cast("binary").alias("key"), F.col("value").cast("binary").alias("value"))
        # A repetition must give each row to the output partition that it had: this depends on the key alone.
        placed = records.withColumn("output", F.expr(f"pmod(hash(key), {self._outputs})"))
        placed.repartition(self._outputs, "key").foreachPartition(partial(self._send, query, batch))

    def commit(self, producer: Producer, output: int) -> None:
        """Commit the transaction of an output partition."""
        producer.commit_transaction(_TIMEOUT_S)

    def delivered(self, query: str, output: int, *, wait: bool = False) -> Delivered | None:
        """What an output partition has of a query.

        Parameters
        ----------
        query : str
            The query's id.
        output : int
            The output partition.
        wait : bool, optional
            Wait for transactions that are open: readers get no later records before these have ended.
        """
        partition = TopicPartition(self._control, output)
        first, end = self._bounds(partition, IsolationLevel.READ_UNCOMMITTED if wait else IsolationLevel.READ_COMMITTED)
        start = end
        while start > first:
            start = max(first, end - 16 * (end - start) - _LAST_OFFSETS)
            if found := self._read_back(query, TopicPartition(self._control, output, start), end):
                return found
        return None

    def _check(self, query: str) -> int:
        """The number of output partitions; the control topic must be fit for its purpose."""
        admin = AdminClient(self._settings)
        resource = ConfigResource(ResourceType.TOPIC, self._control)
        policy = admin.describe_configs([resource])[resource].result(_TIMEOUT_S)["cleanup.policy"].value
        if policy != "compact":
            raise ValueError(f"Set cleanup.policy of the topic {self._control} to compact, not {policy}.")
        outputs = len(admin.list_topics(self._control, _TIMEOUT_S).topics[self._control].partitions)
        for output in range(outputs):
            found = self.delivered(query, output)
            if found is not None and found.outputs != outputs:
                raise ValueError(
                    f"The topic {self._control} has {outputs} partitions, and had {found.outputs} when batch"
                    f" {found.batch} was sent: a repeated batch would be divided in another way."
                )
        return outputs

    def _send(self, query: str, batch: int, rows: Iterator[Row]) -> None:
        """Send the rows of an output partition, unless an earlier attempt has committed them."""
        first = next(rows, None)
        if first is None:
            return
        output = first.output
        settings = {"transactional.id": f"{self._control}-{query}-{output}", "partitioner": "murmur2_random"}
        producer = Producer({**settings, **self._settings})
        # From here on no earlier attempt can commit: what it has begun is aborted, or its commit is waited for.
        producer.init_transactions(_TIMEOUT_S)
        # Those of other queries may hide what this one has committed, so their end is waited for.
        found = self.delivered(query, output, wait=True)
        if found is not None and found.batch >= batch:
            return
        producer.begin_transaction()
        for row in chain([first], rows):
            assert row.output == output
            _produce(producer, TopicPartition(self._topic), row.key, row.value)
        said = json.dumps({"batch": batch, "outputs": self._outputs}).encode()
        _produce(producer, TopicPartition(self._control, output), query.encode(), said)
        # A failure leaves the transaction open: the next attempt ends it, or the broker when it times out.
        self.commit(producer, output)

    def _bounds(self, partition: TopicPartition, isolation: IsolationLevel) -> tuple[int, int]:
        """The first offset, and the end for readers of an isolation level."""
        admin = AdminClient(self._settings)

        def ask(which: OffsetSpec) -> int:
            answers = admin.list_offsets({partition: which}, isolation_level=isolation)
            offset: int = answers[partition].result(_TIMEOUT_S).offset
            return offset

        return ask(OffsetSpec.earliest()), ask(OffsetSpec.latest())

    def _read_back(self, query: str, start: TopicPartition, end: int) -> Delivered | None:
        """The newest record of a query from one offset up to the end; waits for the end if it is not committed."""
        consumer = Consumer(
            {
                "group.id": f"{self._control}-reader",  # must be given, and is not used
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,
                **self._settings,
                "isolation.level": "read_committed",
            }
        )
        found = None
        try:
            consumer.assign([start])
            while True:
                message = consumer.poll(_TIMEOUT_S)
                if message is None:
                    raise TimeoutError(f"The topic {self._control} could not be read up to offset {end}.")
                if error := message.error():
                    if error.code() != KafkaError._PARTITION_EOF:
                        raise KafkaException(error)
                    if message.offset() >= end:
                        return found
                elif message.key() == query.encode():
                    found = Delivered(**json.loads(message.value()))
        finally:
            consumer.close()


def _produce(producer: Producer, place: TopicPartition, key: bytes | None, value: bytes | None) -> None:
    """Hand a record over to the producer, which sends it later."""
    at = {} if place.partition < 0 else {"partition": place.partition}
    record = {"key": None if key is None else bytes(key), "value": None if value is None else bytes(value)}
    while True:
        try:
            producer.produce(place.topic, **record, **at)
        except BufferError:
            producer.poll(1.0)  # until the oldest are sent
        else:
            producer.poll(0)
            return
