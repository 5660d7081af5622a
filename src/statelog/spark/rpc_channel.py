"""What both ends of a call share: limits, the proof of the secret, and bytes over a socket with deadlines."""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from io import BytesIO
from typing import Final

from statelog.clock import Clock


@dataclass(frozen=True)
class RpcPolicy:
    """Limits of the calls, the same at both ends.

    Parameters
    ----------
    call_timeout_s : float
        How long a client waits for the reply to a call.
    handshake_timeout_s : float
        How long a connection may take, from when it is accepted or begun, to prove that it knows the secret.
    max_strangers : int
        Connections without a proof at a time; one more ends the oldest.
    accept_backoff_s : float
        How long no connection is accepted after that has failed, for want of file descriptors, say.
    transfer_timeout_s : float
        How long the rest of a request may take once it has begun, or a client to take its reply.
    max_request_bytes, max_payload_bytes, max_reply_bytes : int
        Size of a request, of the bytes that come with it, and of a reply.
    max_in_flight_bytes : int
        Requests that the server receives or handles at a time, together; a larger one is alone.
    keepalive_idle_s, keepalive_interval_s, keepalive_probes : int
        After so long without traffic the other end's machine is asked whether it is there, so often.
    """

    call_timeout_s: float = 600.0
    handshake_timeout_s: float = 10.0
    max_strangers: int = 256
    accept_backoff_s: float = 0.2
    transfer_timeout_s: float = 300.0
    max_request_bytes: int = 64 << 20
    max_payload_bytes: int = 1 << 30
    max_reply_bytes: int = 256 << 20
    max_in_flight_bytes: int = 1 << 30
    keepalive_idle_s: int = 60
    keepalive_interval_s: int = 10
    keepalive_probes: int = 6


# ---- The handshake: messages of fixed size, so that no length is read of a stranger ----

_MAGIC: Final = b"statelog-rpc-2\0\0"
_NONCE_BYTES: Final = 32
HELLO_BYTES: Final = len(_MAGIC) + _NONCE_BYTES
"""What either side says first; the server begins."""
PROOF_BYTES: Final = 32
"""What follows the client's hello, and then from the server."""


class Side(Enum):
    """Who proves; a proof that one side sends back to the other is worth nothing."""

    CLIENT = b"client"
    SERVER = b"server"


def new_hello() -> bytes:
    """A hello of this version that nobody could foresee."""
    return _MAGIC + os.urandom(_NONCE_BYTES)


def is_hello(data: bytes) -> bool:
    """Whether it is a hello of this version."""
    return len(data) == HELLO_BYTES and data.startswith(_MAGIC)


def is_proof(proof: bytes, secret: bytes, side: Side, server_hello: bytes, client_hello: bytes) -> bool:
    """Whether a side has proved that it knows the secret."""
    return hmac.compare_digest(proof, make_proof(secret, side, server_hello, client_hello))


def make_proof(secret: bytes, side: Side, server_hello: bytes, client_hello: bytes) -> bytes:
    """Prove to the other side that the secret is known, for these hellos only."""
    return hmac.digest(secret, side.value + server_hello + client_hello, "sha256")


# ---- Bytes ----

_JOINED_BYTES: Final = 1 << 16
_RECEIVED_BYTES: Final = 1 << 20


class Channel:
    """A connected socket whose every operation has a deadline, in seconds of the clock that never goes back.

    It raises OSError if the connection is broken, TimeoutError after the deadline, and EOFError at the end.
    """

    def __init__(self, connection: socket.socket, policy: RpcPolicy, clock: Clock) -> None:
        self._socket = connection
        self._clock = clock
        # With delayed acknowledgements Nagle's algorithm adds 40 ms to a call.
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
        # Small ones together are one packet; to join large ones would copy them.
        for data in [b"".join(parts)] if sum(map(len, parts)) <= _JOINED_BYTES else parts:
            self._socket.settimeout(self._left_s(deadline_s))
            self._socket.sendall(data)

    def receive(self, size: int, deadline_s: float) -> bytes:
        """Receive exactly so many bytes; memory is taken as they arrive."""
        received = BytesIO()
        while received.tell() < size:
            self._socket.settimeout(self._left_s(deadline_s))
            received.write(self._receive_some(size - received.tell()))
        return received.getvalue()

    def receive_next(self, size: int, timeout_s: float) -> bytes:
        """Receive exactly so many bytes, the first of which may come at any time, and the rest soon after it."""
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
    """Bounds by their bytes what several threads hold at a time."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def holding(self, size_bytes: int) -> Iterator[None]:
        """Wait until there is room for so many bytes, or nothing else is held, and hold them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held_bytes or self._held_bytes + size_bytes <= self._limit_bytes)
            self._held_bytes += size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._held_bytes -= size_bytes
                self._changed.notify_all()
