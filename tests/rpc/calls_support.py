"""What the tests of :mod:`tests.rpc.test_calls` and others share."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from statelog import ErrorKind, FencedError, ProtocolError
from statelog.clock import SystemClock
from statelog.rpc.calls import RpcClient, RpcServer
from statelog.rpc.channel import RpcPolicy
from statelog.rpc.messages import Ack, Acked, Begin, Ping, Pinged, Reply, Request, TaskId, Tick, Ticked
from statelog.rpc.tls import TlsIdentity
from tests.acks import make_ack
from tests.attempts import make_begun

SECRET = b"s" * 32


HOST = "127.0.0.1"


LONG_S = 30.0


SHORT = RpcPolicy(handshake_timeout_s=0.2, transfer_timeout_s=0.2, call_timeout_s=LONG_S)


BEGUN = make_begun(inline_bytes=10)


class Handler:
    def __init__(self) -> None:
        self.calls: list[tuple[Request, bytes]] = []
        self.waits = threading.Event()
        self.waits.set()

    def __call__(self, request: Request, payload: bytes) -> Reply:
        self.calls.append((request, payload))
        assert self.waits.wait(LONG_S)
        if isinstance(request, Begin):
            return BEGUN
        if isinstance(request, Tick):
            return Ticked(True)
        if isinstance(request, Ping):
            return Pinged(1_780_000_000.0)
        if request.task.attempt == 0:
            raise FencedError("a newer run", kind=ErrorKind.NEWER_EPOCH, hint="Stop.")
        if request.task.attempt == 1:
            raise ZeroDivisionError("a defect")
        return Acked()


@contextmanager
def serving(
    handler: Callable[[Request, bytes], Reply], policy: RpcPolicy, identity: TlsIdentity | None = None
) -> Iterator[RpcServer]:
    server = RpcServer(HOST, 0, SECRET, handler, policy, identity=identity)
    try:
        yield server
    finally:
        server.close()


def client_of(server: RpcServer, policy: RpcPolicy | None = None, **more: Any) -> RpcClient:
    return RpcClient(HOST, server.port, SECRET, policy, certificate=server.certificate, **more)


def ack(attempt: int, name: str = "") -> Ack:
    task = TaskId("query", "run", "uid", "instance", 3, 1, attempt)
    return make_ack(task, b"c" * 16, 5, 1, 2, name, 0.5)


def require_service(server: RpcServer, attempts: int = 1) -> None:
    """Somebody who knows the secret is served."""
    try:
        client = client_of(server)
    except ProtocolError:
        if attempts == 1:
            raise
        return require_service(server, attempts - 1)
    assert client.call(ack(9)) == Acked()
    client.close()


def connect(server: RpcServer) -> socket.socket:
    """A connection of somebody who has proved nothing, but for the handshake of Python's own TLS."""
    connection = socket.create_connection((HOST, server.port), timeout=LONG_S)
    return python_tls(server.certificate).wrap_socket(connection) if server.certificate else connection


def python_tls(certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate)
    return context


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError, ssl.SSLError):
        while data := connection.recv(1 << 16):
            received += data
    return received


def read(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size and (data := connection.recv(size - len(received))):
        received += data
    return received


def serving_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "statelog-rpc"}


def soon_s(seconds: float = LONG_S) -> float:
    return SystemClock().monotonic_s() + seconds
