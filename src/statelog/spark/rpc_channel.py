"""Shared by both ends of a call: limits, and a socket with deadlines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Final

from statelog.clock import Clock


@dataclass(frozen=True)
class RpcPolicy:
    """Limits of the calls, the same at both ends."""

    call_timeout_s: float = 600.0
    """How long a client waits for a reply."""
    handshake_timeout_s: float = 10.0
    """How long a new connection may take to prove that it knows the secret."""
    max_strangers: int = 256
    """Connections without a proof at a time; one more ends the oldest."""
    accept_backoff_s: float = 0.2
    """How long no connection is accepted after accepting has failed, for want of file descriptors, say."""
    transfer_timeout_s: float = 300.0
    """How long the rest of a request may take after its first byte, or a client to take its reply."""
    max_request_bytes: int = 64 << 20
    max_payload_bytes: int = 1 << 30
    """Limit of the bytes that come with a request."""
    max_reply_bytes: int = 256 << 20
    max_in_flight_bytes: int = 1 << 30
    """Total of the requests that the server receives or handles at a time; a larger request is handled alone."""
    keepalive_idle_s: int = 60
    """After so long without traffic, probes ask whether the other end's machine is there."""
    keepalive_interval_s: int = 10
    keepalive_probes: int = 6


_JOINED_BYTES: Final = 1 << 16
_RECEIVED_BYTES: Final = 1 << 20


class Channel:
    """A connected socket whose operations have deadlines, in seconds of the monotonic clock.

    They raise OSError if the connection is broken, TimeoutError after the deadline, and EOFError at the end.
    """

    def __init__(self, connection: socket.socket, policy: RpcPolicy, clock: Clock) -> None:
        self._socket = connection
        self._clock = clock
        # Together with delayed acknowledgements, Nagle's algorithm would add 40 ms to a call.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", policy.keepalive_idle_s),
            ("TCP_KEEPINTVL", policy.keepalive_interval_s),
            ("TCP_KEEPCNT", policy.keepalive_probes),
        ):
            if hasattr(socket, name):  # macOS has another name for the first.
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, parts: Sequence[bytes], deadline_s: float) -> None:
        """Send parts, one after the other."""
        # Small parts joined are one packet; joining large parts would copy them.
        for data in [b"".join(parts)] if sum(map(len, parts)) <= _JOINED_BYTES else parts:
            self._socket.settimeout(self._left_s(deadline_s))
            self._socket.sendall(data)

    def receive(self, size: int, deadline_s: float) -> bytes:
        """Receive exactly `size` bytes; memory grows only as they arrive."""
        received = BytesIO()
        while received.tell() < size:
            self._socket.settimeout(self._left_s(deadline_s))
            received.write(self._receive_some(size - received.tell()))
        return received.getvalue()

    def receive_next(self, size: int, timeout_s: float) -> bytes:
        """Receive exactly `size` bytes: the first at any time, the rest within `timeout_s` after it."""
        self._socket.settimeout(None)
        first = self._receive_some(size)
        return first + self.receive(size - len(first), self._clock.monotonic_s() + timeout_s)

    def _receive_some(self, size: int) -> bytes:
        data = self._socket.recv(min(size, _RECEIVED_BYTES))
        if not data:
            raise EOFError("the connection ended")
        return data

    def _left_s(self, deadline_s: float) -> float:
        left_s = deadline_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class ByteBudget:
    """Bounds the bytes that several threads hold at a time, in total."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def holding(self, size_bytes: int) -> Iterator[None]:
        """Hold so many bytes, once there is room for them or nothing else is held."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held_bytes or self._held_bytes + size_bytes <= self._limit_bytes)
            self._held_bytes += size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._held_bytes -= size_bytes
                self._changed.notify_all()
