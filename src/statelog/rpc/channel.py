"""Shared by both ends of a call: limits, and a socket with deadlines and optional TLS."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Final

from statelog.clock import Clock

if TYPE_CHECKING:  # Without encryption no worker loads OpenSSL.
    from statelog.rpc.tls import Tls


@dataclass(frozen=True)
class RpcPolicy:
    """Limits of the calls; both ends have the same."""

    call_timeout_s: float = 600.0
    """How long a client waits for a reply."""
    handshake_timeout_s: float = 10.0
    """How long a new connection may take to prove that it knows the secret."""
    max_pending: int = 256
    """The most connections without a proof at a time; one more ends the oldest."""
    accept_backoff_s: float = 0.2
    """How long no connection is accepted after accepting has failed, for example for lack of file descriptors."""
    beat_s: float = 5.0
    """How often the server says that a call waits or is being handled."""
    silence_s: float = 20.0
    """Time without a sign of the server after which a client drops a connection and repeats its call on a new one."""
    reconnect_s: float = 1.0
    """Time between two attempts at a new connection."""
    transfer_timeout_s: float = 300.0
    """How long the rest of a request may take after its first byte, or a client may take to read its reply."""
    max_request_bytes: int = 64 << 20
    max_payload_bytes: int = 1 << 30
    """Limit of the bytes that come with a request."""
    max_reply_bytes: int = 256 << 20
    max_in_flight_bytes: int = 1 << 30
    """Total of the requests that the server receives or handles at a time; a larger request is handled alone."""
    keepalive_idle_s: int = 60
    """Time without traffic after which probes ask whether the other end's machine is there."""
    keepalive_interval_s: int = 10
    keepalive_probes: int = 6


_JOINED_BYTES: Final = 1 << 16
_RECEIVED_BYTES: Final = 1 << 20
_ENCRYPTED_BYTES: Final = 1 << 18


class SilentError(OSError):
    """For some time, no byte came from the other end, and none could be sent to it."""


class Channel:
    """A connected socket whose operations have deadlines, in seconds of the monotonic clock.

    They raise OSError if the connection is broken, TimeoutError after the deadline, and EOFError at the end. With a
    `silence_s`, they raise SilentError if no byte travels for that long. `tls` is this end of the connection's TLS
    after its handshake; None if the connection is not encrypted.
    """

    def __init__(self, connection: socket.socket, policy: RpcPolicy, clock: Clock, tls: Tls | None = None) -> None:
        self._socket = connection
        self._clock = clock
        self._ahead = b""
        self.silence_s: float | None = None
        self._tls = tls
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

    def begin_tls(self, tls: Tls, deadline_s: float) -> None:
        """Perform the handshake as the client; raises ssl.SSLError, an OSError, if the server is not the right one."""
        is_complete, to_send = tls.shake_hands()
        while not is_complete:
            self._send_bytes(to_send, deadline_s)
            is_complete, to_send = tls.shake_hands(self._receive_bytes(_RECEIVED_BYTES, deadline_s))
        self._send_bytes(to_send, deadline_s)
        self._tls = tls

    def send(self, parts: Sequence[bytes], deadline_s: float) -> None:
        """Send parts, one after the other."""
        # Small parts joined are one packet; joining large parts would copy them.
        for data in [b"".join(parts)] if sum(map(len, parts)) <= _JOINED_BYTES else parts:
            for piece in [data] if self._tls is None else self._tls.encrypt(data):
                self._send_bytes(piece, deadline_s)

    def _send_bytes(self, data: bytes, deadline_s: float) -> None:
        if self.silence_s is None:
            self._socket.settimeout(self._left_s(deadline_s))
            self._socket.sendall(data)
            return
        rest = memoryview(data)
        self._socket.settimeout(0)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._await_room(deadline_s)

    def _await_room(self, deadline_s: float) -> None:
        """Wait until more can be sent. Bytes that arrive are kept: they show that the other end is there."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while True:
                ready = selector.select(self._patience_s(deadline_s))
                if not ready:
                    self._require_sound(deadline_s)
                events = ready[0][1] if ready else 0
                if events & selectors.EVENT_READ:
                    received = self._socket.recv(_RECEIVED_BYTES)
                    if not received:
                        raise EOFError("the connection ended")
                    self._ahead += received
                if events & selectors.EVENT_WRITE:
                    return

    def _patience_s(self, deadline_s: float) -> float:
        left_s = self._left_s(deadline_s)
        return left_s if self.silence_s is None else min(left_s, self.silence_s)

    def _require_sound(self, deadline_s: float) -> None:
        """Raise SilentError, unless the wait was for the deadline."""
        if self.silence_s is not None and self._clock.monotonic_s() < deadline_s:
            raise SilentError(f"nothing came for {self.silence_s:g} s")

    def receive(self, size: int, deadline_s: float, received_some: Callable[[], None] | None = None) -> bytes:
        """Receive exactly `size` bytes; memory grows only as they arrive. `received_some` is called after each part."""
        received = BytesIO()
        while received.tell() < size:
            received.write(self._receive_some(size - received.tell(), deadline_s))
            if received_some is not None:
                received_some()
        return received.getvalue()

    def receive_next(self, size: int, timeout_s: float) -> bytes:
        """Receive exactly `size` bytes: the first at any time, the rest within `timeout_s` after it."""
        first = self._receive_some(size, None)
        return first + self.receive(size - len(first), self._clock.monotonic_s() + timeout_s)

    def _receive_some(self, size: int, deadline_s: float | None) -> bytes:
        """Receive from 1 to `size` bytes."""
        if self._tls is None:
            return self._receive_bytes(min(size, _RECEIVED_BYTES), deadline_s)
        while not (content := self._tls.decrypt(size)):
            self._tls.take(self._receive_bytes(_ENCRYPTED_BYTES, deadline_s))
        return content

    def _receive_bytes(self, most: int, deadline_s: float | None) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead[:most], self._ahead[most:]
            return data
        self._socket.settimeout(None if deadline_s is None else self._patience_s(deadline_s))
        try:
            data = self._socket.recv(most)
        except TimeoutError as error:
            if deadline_s is not None and error.errno is None:
                self._require_sound(deadline_s)
            raise
        if not data:
            raise EOFError("the connection ended")
        return data

    def _left_s(self, deadline_s: float) -> float:
        left_s = deadline_s - self._clock.monotonic_s()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s

    def shut_down(self) -> None:
        """End the connection while another thread may use it: that thread then gets an error."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

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
    def holding(
        self, size_bytes: int, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[None]:
        """Hold some bytes, once there is room for them or nothing else is held; `waiting` is entered until then."""
        with self._changed:
            if not self._has_room(size_bytes):
                with waiting():
                    self._changed.wait_for(lambda: self._has_room(size_bytes))
            self._held_bytes += size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._held_bytes -= size_bytes
                self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        return not self._held_bytes or self._held_bytes + size_bytes <= self._limit_bytes
