"""Calls to the driver: who knows the secret is answered, nobody else."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import Client

import pytest

from statelog import ErrorKind, FencedError, ProtocolError
from statelog.checkpoint.protocol import Ack, Acked, Begin, Begun, Reply, Request, TaskId
from statelog.spark.rpc import RpcClient, RpcServer

SECRET = b"s" * 32
TASK = TaskId("query", "run", "uid", "instance", 3, 1, 77)


class Handler:
    def __init__(self) -> None:
        self.calls: list[tuple[Request, bytes]] = []

    def __call__(self, request: Request, payload: bytes) -> Reply:
        self.calls.append((request, payload))
        if isinstance(request, Begin):
            return Begun(1, b"g", b"h", 10, "p", "s", 5, 6)
        if request.task.attempt == 0:
            raise FencedError("a newer run", kind=ErrorKind.NEWER_EPOCH, hint="Stop.")
        if request.task.attempt == 1:
            raise ZeroDivisionError("a defect")
        return Acked()


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def server(handler: Handler) -> Iterator[RpcServer]:
    server = RpcServer("127.0.0.1", 0, SECRET, handler)
    yield server
    server.close()


def ack(attempt: int) -> Ack:
    task = TaskId("query", "run", "uid", "instance", 3, 1, attempt)
    return Ack(task, b"c" * 16, 5, 1, 2, "", 0.5)


def test_calls_and_payloads_arrive(server: RpcServer, handler: Handler) -> None:
    client = RpcClient("127.0.0.1", server.port, SECRET)
    assert client.call(Begin(TASK, 1, 10, None)) == Begun(1, b"g", b"h", 10, "p", "s", 5, 6)
    big = b"x" * 3_000_000
    assert client.call(ack(9), big) == Acked()
    assert handler.calls[1] == (ack(9), big)


def test_errors_come_back_as_what_they_were(server: RpcServer) -> None:
    client = RpcClient("127.0.0.1", server.port, SECRET)
    with pytest.raises(FencedError, match=r"a newer run Stop\. \[newer-epoch\]"):
        client.call(ack(0))
    with pytest.raises(ProtocolError, match="ZeroDivisionError: a defect"):
        client.call(ack(1))
    assert client.call(ack(9)) == Acked(), "the connection goes on"


def test_wrong_secret_is_not_answered(server: RpcServer, handler: Handler) -> None:
    with pytest.raises(ProtocolError, match="cannot be reached"):
        RpcClient("127.0.0.1", server.port, b"w" * 32)
    assert handler.calls == []


def test_call_without_handshake_is_not_answered(server: RpcServer, handler: Handler) -> None:
    with Client(("127.0.0.1", server.port)) as stranger:
        stranger.recv_bytes()
        stranger.send_bytes(b"\x00" * 64)
        with pytest.raises(EOFError):
            stranger.recv_bytes()
    assert handler.calls == []


def test_huge_unauthenticated_message_is_not_read(server: RpcServer, handler: Handler) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.sendall(struct.pack("!i", 500_000_000))
        stranger.settimeout(5)
        received = b"".join(iter(lambda: stranger.recv(4096), b""))
    assert len(received) <= 4 + 32, "nothing but the challenge"
    assert handler.calls == []


def test_silent_stranger_does_not_hold_up_others(server: RpcServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)):
        client = RpcClient("127.0.0.1", server.port, SECRET)
        assert client.call(ack(9)) == Acked()


def test_client_refuses_a_server_that_does_not_know_the_secret() -> None:
    class Impostor(RpcServer):
        pass

    impostor = Impostor("127.0.0.1", 0, b"i" * 32, Handler())
    with pytest.raises(ProtocolError):
        RpcClient("127.0.0.1", impostor.port, SECRET)
    impostor.close()


def test_unreachable_driver_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(ProtocolError, match=f"127.0.0.1:{port} cannot be reached"):
        RpcClient("127.0.0.1", port, SECRET)


def test_bytes_that_are_no_request_are_an_error(server: RpcServer) -> None:
    client = RpcClient("127.0.0.1", server.port, SECRET)
    client._connection.send_bytes(b"\x80\x04cos\nsystem\n")
    client._connection.send_bytes(b"")
    assert b"ProtocolError" in client._connection.recv_bytes()
