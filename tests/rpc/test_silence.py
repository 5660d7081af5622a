"""Calls over a network that drops all packets for some time, and over one where only the driver is slow."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from statelog import ProtocolError
from statelog.rpc.calls import RpcClient
from statelog.rpc.channel import RpcPolicy
from statelog.rpc.messages import Acked, Reply, Request
from statelog.rpc.tls import TlsIdentity, new_identity
from tests.rpc.calls_support import HOST, LONG_S, SECRET, Handler, ack, serving

POLICY = RpcPolicy(handshake_timeout_s=1, silence_s=0.5, beat_s=0.05, reconnect_s=0.02, call_timeout_s=LONG_S)
LARGE = os.urandom(20_000_000)


class Wire:
    """Passes bytes on, or drops them. What a connection has lost never comes: its end is silent from then on."""

    def __init__(self, port: int) -> None:
        self.server_port = port
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.drops_calls_after: int | None = None
        """How many more bytes pass to the server; None for all."""
        self.drops_replies = False
        self.dropped = threading.Event()
        self.connections = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        self.drops_calls_after, self.drops_replies = None, False

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                far = socket.create_connection((HOST, self.server_port))
                self._sockets += [near, far]
                threading.Thread(target=self._pass_calls, args=(near, far), daemon=True).start()
                threading.Thread(target=self._pass_replies, args=(far, near), daemon=True).start()

    def _pass_calls(self, near: socket.socket, far: socket.socket) -> None:
        is_lost = False
        with suppress(OSError):
            while data := near.recv(1 << 16):
                if self.drops_calls_after is not None:
                    data, is_lost = data[: self.drops_calls_after], is_lost or len(data) > self.drops_calls_after
                    self.drops_calls_after -= len(data)
                    if is_lost:
                        self.dropped.set()
                if data and not is_lost:
                    far.sendall(data)

    def _pass_replies(self, far: socket.socket, near: socket.socket) -> None:
        is_lost = False
        with suppress(OSError):
            while data := far.recv(1 << 16):
                is_lost = is_lost or self.drops_replies
                if is_lost:
                    self.dropped.set()
                else:
                    near.sendall(data)

    def close(self) -> None:
        for one in (self._listener, *self._sockets):
            one.close()


@contextmanager
def wired(
    handler: Handler, identity: TlsIdentity | None, policy: RpcPolicy = POLICY
) -> Iterator[tuple[Wire, RpcClient]]:
    with serving(handler, policy, identity) as server:
        wire = Wire(server.port)
        try:
            client = RpcClient(HOST, wire.port, SECRET, policy, certificate=server.certificate)
            yield wire, client
            client.close()
        finally:
            wire.close()


@contextmanager
def calling(client: RpcClient, attempt: int, payload: bytes = b"") -> Iterator[Future[Reply]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(client.call, ack(attempt), payload)


@pytest.mark.parametrize(("passes", "payload"), [(0, b""), (5, b""), (1_000_000, LARGE)])
def test_a_call_that_is_lost_on_its_way_is_repeated(identity: TlsIdentity | None, passes: int, payload: bytes) -> None:
    handler = Handler()
    with wired(handler, identity) as (wire, client):
        assert client.call(ack(9)) == Acked()
        wire.drops_calls_after = passes
        with calling(client, 8, payload) as reply:
            assert wire.dropped.wait(LONG_S)
            wire.heal()
            assert reply.result(LONG_S / 2) == Acked()
        assert wire.connections == 2
        assert handler.calls[1:] == [(ack(8), payload)]
        assert client.call(ack(7)) == Acked()
        assert wire.connections == 2, "the new connection is kept"


def test_a_call_whose_reply_is_lost_is_repeated(identity: TlsIdentity | None) -> None:
    handler = Handler()
    with wired(handler, identity) as (wire, client):
        wire.drops_replies = True
        with calling(client, 8, b"payload") as reply:
            assert wire.dropped.wait(LONG_S)
            wire.heal()
            assert reply.result(LONG_S / 2) == Acked()
        assert handler.calls == [(ack(8), b"payload")] * 2


def test_new_connections_are_tried_until_there_is_one(identity: TlsIdentity | None) -> None:
    handler = Handler()
    policy = replace(POLICY, handshake_timeout_s=0.3)
    with wired(handler, identity, policy) as (wire, client):
        wire.drops_calls_after = 0
        with calling(client, 8) as reply:
            while wire.connections < 4:
                assert not reply.done()
                wire.dropped.wait(0.01)
            wire.heal()
            assert reply.result(LONG_S / 2) == Acked()
        assert handler.calls == [(ack(8), b"")]


def test_another_driver_at_the_address_is_not_waited_for(tls_identity: TlsIdentity) -> None:
    with wired(Handler(), tls_identity) as (wire, client), serving(Handler(), POLICY, new_identity()) as server:
        wire.drops_calls_after = 0
        with calling(client, 8) as reply:
            assert wire.dropped.wait(LONG_S)
            wire.server_port = server.port
            wire.heal()
            with pytest.raises(ProtocolError, match="lacks the certificate of this query's driver"):
                reply.result(LONG_S / 2)


def test_a_call_ends_with_its_time(identity: TlsIdentity | None) -> None:
    handler = Handler()
    with wired(handler, identity, replace(POLICY, call_timeout_s=1.2, handshake_timeout_s=0.3)) as (wire, client):
        wire.drops_calls_after = 0
        with pytest.raises(ProtocolError, match="operator 'uid', subtask 1, batch 3: .* cannot be reached"):
            client.call(ack(8))
        assert client.is_broken
        assert handler.calls == []


def test_a_driver_that_takes_long_is_not_silent(identity: TlsIdentity | None) -> None:
    handler = Handler()
    handler.waits.clear()
    with wired(handler, identity) as (wire, client), calling(client, 8) as reply:
        with pytest.raises(TimeoutError):
            reply.result(3 * POLICY.silence_s)
        handler.waits.set()
        assert reply.result(LONG_S) == Acked()
        assert len(handler.calls) == wire.connections == 1


def test_a_driver_that_has_no_room_is_not_silent(identity: TlsIdentity | None) -> None:
    """The client cannot send all of its call before there is room."""
    waits = threading.Event()
    calls: list[int] = []

    def handle(request: Request, payload: bytes) -> Reply:
        calls.append(len(payload))
        if not payload:
            assert waits.wait(LONG_S)
        return Acked()

    policy = replace(POLICY, max_in_flight_bytes=1000)
    with serving(handle, policy, identity) as server:
        first, second = (RpcClient(HOST, server.port, SECRET, policy, certificate=server.certificate) for _ in range(2))
        with calling(first, 8) as reply:
            while not calls:
                waits.wait(0.01)
            with calling(second, 9, LARGE) as other:
                with pytest.raises(TimeoutError):
                    other.result(3 * POLICY.silence_s)
                assert calls == [0]
                waits.set()
                assert reply.result(LONG_S) == other.result(LONG_S) == Acked()
        assert calls == [0, len(LARGE)]
        first.close()
        second.close()
