"""Events at a constant rate, for Spark's socket source: line N is the number N, due N / rate seconds from the start.

Spark's rate source is of no use for latencies, because it has the rows of a second at its end only. Its socket source
has a row as soon as the line is there, tells which rows a batch has, and is in the JVM, so it costs no Python process.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Final, Self

_TICK_S: Final = 0.002
_POLL_S: Final = 0.05


class EventSender:
    """Sends events to the first one who connects, once `is_ready` says so; in a thread. A context manager."""

    def __init__(self, rate: float, events: int, is_ready: Callable[[], bool]) -> None:
        self._rate = rate
        self._events = events
        self._is_ready = is_ready
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._started_s: float | None = None
        self.latest_s = 0.0
        """By how much an event was sent later than it was due, at most."""

    @property
    def started_s(self) -> float:
        """When event 0 was due, seconds since the Unix epoch; RuntimeError if nobody has read any events."""
        if self._started_s is None:
            raise RuntimeError("nobody has read any events")
        return self._started_s

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        # Closing a socket does not wake up a thread that waits for a connection to it.
        with socket.socket() as own:
            own.connect_ex(self.address)
        self._thread.join()
        self._server.close()

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        with connection:
            while not self._is_over.is_set() and not self._is_ready():
                self._is_over.wait(_POLL_S)
            try:
                if not self._is_over.is_set():
                    self._send(connection)
                self._is_over.wait()
            except OSError:
                return  # the reader has gone

    def _send(self, connection: socket.socket) -> None:
        # By the clock that commits are told by, not by a monotonic one.
        started_s = self._started_s = time.time()
        sent = 0
        while sent < self._events and not self._is_over.is_set():
            due = min(self._events, int((time.time() - started_s) * self._rate) + 1)
            if due > sent:
                connection.sendall(b"".join(b"%d\n" % number for number in range(sent, due)))
                self.latest_s = max(self.latest_s, time.time() - started_s - sent / self._rate)
                sent = due
            self._is_over.wait(_TICK_S)
