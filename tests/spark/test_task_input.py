"""Input and output of a task travel without a wait for an acknowledgment."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from statelog.spark.worker.worker import send_at_once, task_function

DELAY_S = 0.040
"""For how long Linux delays an acknowledgment, at least."""
_UNACKNOWLEDGED = struct.Struct("=24xI")
"""The number of segments without an acknowledgment, in Linux's information about a connection."""


class WholeInput:
    """How long a task waits for its input, in seconds."""

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        started_s = time.perf_counter()
        for _ in batches:
            pass
        yield pa.RecordBatch.from_pydict({"waited_s": [time.perf_counter() - started_s]})


@pytest.mark.spark
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux delays acknowledgments like this")
def test_a_task_does_not_wait_for_an_acknowledgment(spark: SparkSession) -> None:
    """A busy machine makes a task wait at times, but the delay would be there each time."""
    rows = spark.range(2000, numPartitions=1)
    waited_s = [
        row[0] for _ in range(12) for row in rows.mapInArrow(task_function(WholeInput()), "waited_s double").collect()
    ]
    # A new connection has no delay yet.
    assert min(waited_s[4:]) < DELAY_S / 2, waited_s


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux delays acknowledgments like this")
def test_what_has_come_is_acknowledged() -> None:
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        sender = opened.enter_context(socket.create_connection(server.getsockname()))
        receiver = opened.enter_context(server.accept()[0])
        for other in socket.socketpair():  # another kind of socket is no obstacle
            opened.enter_context(other)
        for _ in range(20):  # a conversation, after which Linux delays acknowledgments
            sender.sendall(b"request")
            receiver.recv(100)
            receiver.sendall(b"response")
            sender.recv(100)
        sender.sendall(b"first")
        receiver.recv(100)
        assert unacknowledged(sender) == 1
        send_at_once()
        assert unacknowledged(sender) == 0
        assert receiver.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        sender.sendall(b"second")
        receiver.recv(100)
        assert unacknowledged(sender) == 0


def test_a_default_timeout_does_not_change_open_connections() -> None:
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        connection = opened.enter_context(socket.create_connection(server.getsockname()))
        opened.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        socket.setdefaulttimeout(5)
        send_at_once()
        assert socket.getdefaulttimeout() == 5
        assert os.get_blocking(connection.fileno())


def unacknowledged(sender: socket.socket) -> int:
    found = sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKNOWLEDGED.size)
    return int(_UNACKNOWLEDGED.unpack(found)[0])
