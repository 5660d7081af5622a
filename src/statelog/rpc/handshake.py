"""The handshake, in which client and server prove to each other that they know the secret.

Its messages are of fixed size, so that a pending connection cannot announce a length. The server does it in one thread
for all pending connections. With TLS, both sides first perform TLS's own handshake, and these messages are encrypted.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from statelog.clock import Clock
from statelog.log_fields import get_logger
from statelog.rpc.channel import Channel, RpcPolicy

if TYPE_CHECKING:
    from statelog.rpc.tls import Tls, TlsIdentity

_log = get_logger(__name__)

_MAGIC: Final = b"statelog-rpc-3\0\0"
_NONCE_BYTES: Final = 32
HELLO_BYTES: Final = len(_MAGIC) + _NONCE_BYTES
"""Size of the first message of each side; the server begins."""
PROOF_BYTES: Final = 32
"""Size of a proof: the client sends its own right after its hello, then the server answers with its own."""
_ANSWER_BYTES: Final = HELLO_BYTES + PROOF_BYTES
_ENCRYPTED_BYTES: Final = 16 << 10
"""The most that the server reads from a client before its proof with TLS; our own clients send less than 3 KB."""


class Side(Enum):
    """The side that proves. It is part of the proof, so a proof that is sent back to its sender is worthless."""

    CLIENT = b"client"
    SERVER = b"server"


def new_hello() -> bytes:
    """An unpredictable hello of this protocol version."""
    return _MAGIC + os.urandom(_NONCE_BYTES)


def is_hello(data: bytes) -> bool:
    """Whether bytes are a hello of this protocol version."""
    return len(data) == HELLO_BYTES and data.startswith(_MAGIC)


def is_proof(proof: bytes, secret: bytes, side: Side, server_hello: bytes, client_hello: bytes) -> bool:
    """Whether a side has proved that it knows the secret."""
    return hmac.compare_digest(proof, make_proof(secret, side, server_hello, client_hello))


def make_proof(secret: bytes, side: Side, server_hello: bytes, client_hello: bytes) -> bytes:
    """Prove knowledge of the secret, for these two hellos only."""
    return hmac.digest(secret, side.value + server_hello + client_hello, "sha256")


def prove(channel: Channel, secret: bytes, deadline_s: float) -> bool:
    """Prove to the server that the secret is known; False if the server cannot prove it, or has another version."""
    server_hello, client_hello = channel.receive(HELLO_BYTES, deadline_s), new_hello()
    if not is_hello(server_hello):
        return False
    channel.send([client_hello, make_proof(secret, Side.CLIENT, server_hello, client_hello)], deadline_s)
    proof = channel.receive(PROOF_BYTES, deadline_s)
    return is_proof(proof, secret, Side.SERVER, server_hello, client_hello)


# ---- The server's side ----


@dataclass(eq=False)
class _Pending:
    """A connection that has not yet proved that it knows the secret; these fields are all that is held for it."""

    connection: socket.socket
    expires_s: float
    tls: Tls | None
    """This end of its TLS; None if the connection is not encrypted."""
    is_private: bool = False
    """Whether TLS's handshake is complete. The hello follows it."""
    encrypted_bytes: int = 0
    """How many bytes have been received with TLS."""
    hello: bytes = field(default_factory=new_hello)
    answer: bytes = b""


class PendingConnections:
    """Accepts connections, and passes those that prove that they know the secret on to `admit`.

    The others can use only bounded resources: :class:`RpcPolicy` limits their number and their time, the server reads
    no more from each than the one message of fixed size that it has to send (16 KB with TLS), and they get no threads.
    `identity` is the server's TLS identity; None for unencrypted connections. :meth:`close` closes `listener` too.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        admit: Callable[[socket.socket, Tls | None], None],
        policy: RpcPolicy,
        clock: Clock,
        identity: TlsIdentity | None = None,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._admit = admit
        self._policy = policy
        self._clock = clock
        self._identity = identity
        # The oldest first; all get the same time, so they also expire in this order.
        self._pending: dict[_Pending, None] = {}
        self._resumes_s: float | None = None
        self._is_failing = False
        self._closing = threading.Event()
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._thread = threading.Thread(target=self._run, name="statelog-rpc", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop accepting, and close the connections without a proof."""
        self._closing.set()
        with suppress(OSError):
            self._waker.send(b"\0")
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                for key, _ in self._selector.select(self._wait_s()):
                    key.data()
                self._expire()
            except Exception as error:  # Tasks must be able to connect after any error.
                self._back_off(error)
                self._closing.wait(self._policy.accept_backoff_s)
        for pending in list(self._pending):
            self._drop(pending)
        self._selector.close()
        for held in (self._listener, self._waker, self._woken):
            held.close()

    def _wait_s(self) -> float | None:
        oldest = next(iter(self._pending), None)
        until = [self._resumes_s, None if oldest is None else oldest.expires_s]
        soonest_s = min((one for one in until if one is not None), default=None)
        return None if soonest_s is None else max(soonest_s - self._clock.monotonic_s(), 0)

    def _expire(self) -> None:
        now_s = self._clock.monotonic_s()
        for pending in list(self._pending):
            if pending.expires_s > now_s:
                break
            self._drop(pending)
        if self._resumes_s is not None and self._resumes_s <= now_s:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._resumes_s = None

    # ---- Accepting ----

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # The client is already gone.
        except OSError as error:
            self._back_off(error)
            return
        if self._is_failing:
            self._is_failing = False
            _log.warning("connections from tasks are accepted again")
        while len(self._pending) >= self._policy.max_pending:
            self._drop_oldest()
        tls = None if self._identity is None else self._identity.accept()
        pending = _Pending(connection, self._clock.monotonic_s() + self._policy.handshake_timeout_s, tls)
        self._pending[pending] = None
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(pending))
        if tls is None:
            self._send(pending, pending.hello)

    def _back_off(self, error: Exception) -> None:
        """Accept again a little later; otherwise a waiting connection would make this a busy loop."""
        if not self._is_failing:
            self._is_failing = True
            _log.warning(
                "connections from tasks cannot be accepted for now; trying again every %.1f s: %s: %s",
                self._policy.accept_backoff_s,
                type(error).__name__,
                error,
            )
        self._drop_oldest()  # This may free the missing file descriptor.
        if self._resumes_s is None:
            self._resumes_s = self._clock.monotonic_s() + self._policy.accept_backoff_s
            with suppress(KeyError, ValueError):
                self._selector.unregister(self._listener)

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._pending), None)
        if oldest is not None:
            self._drop(oldest)

    def _drop(self, pending: _Pending) -> None:
        self._forget(pending)
        with suppress(OSError):
            pending.connection.close()

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending]
        with suppress(KeyError, ValueError):  # Its registration may have failed.
            self._selector.unregister(pending.connection)

    # ---- The handshake ----

    def _read(self, pending: _Pending) -> None:
        if pending not in self._pending:
            return  # Dropped since the selector saw it.
        try:
            is_open = self._receive(pending)
        except BlockingIOError:
            return
        except OSError as error:
            _log.debug("a connection was refused: %s", error)
            is_open = False
        if not is_open:
            self._drop(pending)
        elif len(pending.answer) == _ANSWER_BYTES:
            self._decide(pending)

    def _receive(self, pending: _Pending) -> bool:
        """Receive more of the answer; False if there is no more, or the other end does not read.

        Raises OSError if the connection is broken, or breaks TLS's protocol.
        """
        tls = pending.tls
        if tls is None:
            received = pending.connection.recv(_ANSWER_BYTES - len(pending.answer))
            pending.answer += received
            return bool(received)
        received = pending.connection.recv(_ENCRYPTED_BYTES - pending.encrypted_bytes)
        pending.encrypted_bytes += len(received)
        if pending.is_private:
            tls.take(received)
        elif received:
            pending.is_private, to_send = tls.shake_hands(received)
            if pending.is_private:
                to_send += b"".join(tls.encrypt(pending.hello))
            if pending.connection.send(to_send) != len(to_send):
                return False
        while pending.is_private and (content := tls.decrypt(_ANSWER_BYTES - len(pending.answer))):
            pending.answer += content
        return bool(received)

    def _decide(self, pending: _Pending) -> None:
        hello, proof = pending.answer[:HELLO_BYTES], pending.answer[HELLO_BYTES:]
        if not (is_hello(hello) and is_proof(proof, self._secret, Side.CLIENT, pending.hello, hello)):
            _log.debug("a connection was refused: it does not know the secret")
            self._drop(pending)
        elif self._send(pending, make_proof(self._secret, Side.SERVER, pending.hello, hello)):
            self._forget(pending)
            self._admit(pending.connection, pending.tls)

    def _send(self, pending: _Pending, data: bytes) -> bool:
        """Send a few bytes. Every socket has room for them, so a connection that does not take them is dropped."""
        try:
            to_send = data if pending.tls is None else b"".join(pending.tls.encrypt(data))
            is_sent = pending.connection.send(to_send) == len(to_send)
        except OSError:
            is_sent = False
        if not is_sent:
            self._drop(pending)
        return is_sent
