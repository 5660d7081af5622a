"""Calls from Python workers to the driver: byte messages over TCP, after a mutual proof of a secret.

Measured against pyarrow.flight on one machine, this takes a third of the time for small and for large
messages (``docs/design/0001-commit-protocol.md`` has the figures), and nothing received is ever unpickled.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Final

import msgspec

from statelog.checkpoint.protocol import Failure, Reply, Request
from statelog.errors import ErrorKind, ProtocolError, StatelogError, error_from_parts

__all__ = ["RpcClient", "RpcServer"]

_log = logging.getLogger(__name__)

_NONCE_BYTES: Final = 32
_HANDSHAKE_TIMEOUT_S: Final = 10.0
_WAKE_TIMEOUT_S: Final = 5.0
_MAX_MESSAGE_BYTES: Final = 1 << 30
_VERSION: Final = b"statelog-rpc-1"

_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(Request)
_replies: Final = msgspec.msgpack.Decoder(Reply)

Handler = Callable[[Request, bytes], Reply]


class RpcServer:
    """Answers calls in one thread per connection.

    Parameters
    ----------
    host, port : str, int
        Address to listen on; port 0 takes a free one.
    secret : bytes
        Clients and server prove to each other that they know it; it is never sent.
    handle : callable
        Answers a request that comes with bytes; called by several threads. Statelog's errors become the
        reply, others are logged and become a :class:`ProtocolError`.
    """

    def __init__(self, host: str, port: int, secret: bytes, handle: Handler) -> None:
        self._secret = secret
        self._handle = handle
        self._host = host
        self._listener = Listener((host, port), backlog=512)
        self.port: int = self._listener.address[1]
        self._is_closed = False
        self._acceptor = threading.Thread(target=self._accept, name="statelog-rpc", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            if self._is_closed:
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection,), name="statelog-rpc", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                _send_at_once(connection)
                if not _prove_to_client(connection, self._secret):
                    return
                while True:
                    request = connection.recv_bytes(_MAX_MESSAGE_BYTES)
                    payload = connection.recv_bytes(_MAX_MESSAGE_BYTES)
                    connection.send_bytes(_encoder.encode(self._answer(request, payload)))
            except (EOFError, OSError):
                return

    def _answer(self, request: bytes, payload: bytes) -> Reply:
        try:
            return self._handle(_requests.decode(request), payload)
        except StatelogError as error:
            return Failure(type(error).__name__, error.message, str(error.kind), error.hint)
        except Exception as error:
            _log.exception("a call of a task failed")
            message = f"The coordinator failed: {type(error).__name__}: {error}."
            return Failure("ProtocolError", message, str(ErrorKind.RPC), "The driver's log has the traceback.")

    def close(self) -> None:
        """Stop listening; connections that are open stay so until their clients end."""
        self._is_closed = True
        # An accept that is waiting would take one more connection, so it gets this one.
        with suppress(OSError), socket.create_connection((self._host, self.port), timeout=_WAKE_TIMEOUT_S):
            self._acceptor.join(_WAKE_TIMEOUT_S)
        self._listener.close()


class RpcClient:
    """A connection to the driver; one thread at a time uses it.

    Parameters
    ----------
    host, port : str, int
        Address of the server.
    secret : bytes
        The secret.

    Raises
    ------
    ProtocolError
        If the driver cannot be reached, or does not know the secret.
    """

    def __init__(self, host: str, port: int, secret: bytes) -> None:
        self._where = f"the coordinator at {host}:{port}"
        self.process_id = os.getpid()
        self.is_broken = False
        try:
            self._connection = Client((host, port))
            _send_at_once(self._connection)
            is_known = _prove_to_server(self._connection, secret)
        except (EOFError, OSError) as error:
            raise self._broken(error) from error
        if not is_known:
            raise ProtocolError(f"{self._where} does not know this query's secret.", hint="Restart the query.")

    def call(self, request: Request, payload: bytes = b"") -> Reply:
        """Send a request with bytes, and wait for the reply.

        Raises
        ------
        StatelogError
            The error that the call caused on the driver.
        ProtocolError
            If the connection broke; the call may have had its effect.
        """
        try:
            self._connection.send_bytes(_encoder.encode(request))
            self._connection.send_bytes(payload)
            reply: Reply = _replies.decode(self._connection.recv_bytes(_MAX_MESSAGE_BYTES))
        except (EOFError, OSError) as error:
            raise self._broken(error) from error
        if isinstance(reply, Failure):
            raise error_from_parts(reply.error, reply.message, reply.kind, reply.hint)
        return reply

    def _broken(self, error: Exception) -> ProtocolError:
        self.is_broken = True
        return ProtocolError(
            f"{self._where} cannot be reached: {type(error).__name__}: {error}.",
            hint="If the driver runs, set spark.statelog.coordinator.host and .port to an address that"
            " the executors reach.",
        )

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _send_at_once(connection: Connection) -> None:
    """Switch Nagle's algorithm off: with delayed acknowledgements it adds 40 ms to a call."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _prove_to_client(connection: Connection, secret: bytes) -> bool:
    own = os.urandom(_NONCE_BYTES)
    connection.send_bytes(own)
    if not connection.poll(_HANDSHAKE_TIMEOUT_S):
        return False
    answer = connection.recv_bytes(2 * _NONCE_BYTES)
    other, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", own, other)):
        return False
    connection.send_bytes(_proof(secret, b"server", own, other))
    return True


def _prove_to_server(connection: Connection, secret: bytes) -> bool:
    other = connection.recv_bytes(_NONCE_BYTES)
    own = os.urandom(_NONCE_BYTES)
    connection.send_bytes(own + _proof(secret, b"client", other, own))
    return hmac.compare_digest(connection.recv_bytes(_NONCE_BYTES), _proof(secret, b"server", other, own))


def _proof(secret: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret, _VERSION + side + server_nonce + client_nonce, "sha256")
