"""Connections that have proved nothing yet: what they can take is bounded, and none holds up the others."""

from __future__ import annotations

import errno
import logging
import os
import queue
import resource
import selectors
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from statelog import ProtocolError
from statelog.clock import Clock, SystemClock
from statelog.rpc.calls import RpcClient, RpcServer
from statelog.rpc.channel import RpcPolicy
from statelog.rpc.handshake import HELLO_BYTES, PROOF_BYTES, PendingConnections, Side, make_proof, new_hello
from statelog.rpc.tls import TlsIdentity
from statelog.testing.query import ManualClock
from tests.rpc.calls_support import (
    HOST,
    LONG_S,
    SECRET,
    SHORT,
    Handler,
    ack,
    connect,
    read,
    read_to_end,
    require_service,
    serving,
    serving_threads,
)


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def server(handler: Handler, identity: TlsIdentity | None) -> Iterator[RpcServer]:
    with serving(handler, RpcPolicy(), identity) as server:
        yield server


class Listener(socket.socket):
    """Accepts as the system may: it fails at first if it is told how, and connections are of a class."""

    def __init__(self, connections: type[socket.socket] = socket.socket, *failures: OSError) -> None:
        super().__init__()
        self._connections, self.failures = connections, list(failures)
        self.attempts = 0
        self.bind((HOST, 0))
        self.listen()

    def accept(self) -> tuple[socket.socket, Any]:
        self.attempts += 1
        if self.failures:
            raise self.failures.pop(0)
        connection, address = super().accept()
        return self._connections(fileno=connection.detach()), address


@contextmanager
def pending_connections(
    admit: Callable[[socket.socket], None],
    policy: RpcPolicy,
    listener: socket.socket | None = None,
    clock: Clock | None = None,
) -> Iterator[tuple[int, socket.socket]]:
    """PendingConnections without a server: the port, and what accepts them."""
    listener = listener or Listener()
    accepting = PendingConnections(
        listener, SECRET, lambda connection, _: admit(connection), policy, clock or SystemClock()
    )
    try:
        yield listener.getsockname()[1], listener
    finally:
        accepting.close(LONG_S)


def visit(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=LONG_S / 5)


def prove(pending: socket.socket, *, behind: bytes = b"") -> None:
    """Become known; what is sent behind the proof is not for the handshake."""
    hello, own = read(pending, HELLO_BYTES), new_hello()
    pending.sendall(own + make_proof(SECRET, Side.CLIENT, hello, own) + behind)
    assert len(read(pending, PROOF_BYTES)) == PROOF_BYTES


def reset(pending: socket.socket) -> None:
    """Close without a word."""
    pending.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    pending.close()


def test_whatever_goes_wrong_with_one_the_next_is_admitted(notes: Notes) -> None:
    admitted: list[socket.socket] = []

    def admit(connection: socket.socket) -> None:
        admitted.append(connection)
        if len(admitted) == 1:
            raise ZeroDivisionError("a defect")

    with ExitStack() as held, pending_connections(admit, RpcPolicy(accept_backoff_s=0.01)) as (port, listener):
        assert not listener.getblocking(), "a client that is gone again would hold up the others"
        for _ in range(2):
            prove(held.enter_context(visit(port)))
        notes.wait_for("a defect")
    assert not any(connection.getblocking() for connection in admitted), "a pending connection would hold up the others"
    assert all(connection.fileno() >= 0 for connection in admitted), "it belongs to whom it was handed"
    for connection in admitted:
        connection.close()


@pytest.mark.parametrize(
    ("backoff_s", "handshake_s"), [(10 * LONG_S, 0.2), (0.01, 10 * LONG_S)], ids=["pending_connections", "acceptance"]
)
def test_what_is_due_first_is_not_held_up_by_what_is_due_later(
    handler: Handler, notes: Notes, backoff_s: float, handshake_s: float
) -> None:
    """Pending connections end in time although none is accepted, and accepting goes on while others have time."""
    policy = RpcPolicy(accept_backoff_s=backoff_s, handshake_timeout_s=handshake_s)
    with ExitStack() as held, serving(handler, policy) as server:
        first, second = (held.enter_context(connect(server)) for _ in range(2))
        for pending in (first, second):
            read(pending, HELLO_BYTES)
        waiting = held.enter_context(socket.socket())
        waiting.settimeout(LONG_S)
        with no_file_descriptors():
            waiting.connect((HOST, server.port))
            notes.wait_for("cannot be accepted for now")
        assert read_to_end(first) == b"", "the oldest makes room"
        if handshake_s < backoff_s:
            assert read_to_end(second) == b""
        else:
            assert len(read(waiting, HELLO_BYTES)) == HELLO_BYTES


def test_wrong_secret_is_not_answered(server: RpcServer, handler: Handler) -> None:
    with pytest.raises(ProtocolError, match="cannot be reached"):
        RpcClient(HOST, server.port, b"w" * 32, certificate=server.certificate)
    assert handler.calls == []


def test_call_without_handshake_is_not_answered(server: RpcServer, handler: Handler) -> None:
    request = msgspec.msgpack.encode(ack(9))
    with connect(server) as pending:
        pending.sendall(struct.pack("!IQ", len(request), 0) + request)
        assert len(read_to_end(pending)) == HELLO_BYTES
    assert handler.calls == []


def test_a_proof_for_another_connection_is_worth_nothing(server: RpcServer, handler: Handler) -> None:
    with connect(server) as first, connect(server) as second:
        own = new_hello()
        proof = make_proof(SECRET, Side.CLIENT, read(first, HELLO_BYTES), own)
        read(second, HELLO_BYTES)
        second.sendall(own + proof)
        assert read_to_end(second) == b""


def test_a_client_of_another_version_is_not_answered(server: RpcServer) -> None:
    with connect(server) as pending:
        own = b"statelog-rpc-2\0\0" + bytes(HELLO_BYTES - 16)
        pending.sendall(own + make_proof(SECRET, Side.CLIENT, read(pending, HELLO_BYTES), own))
        assert read_to_end(pending) == b""


def test_no_more_than_the_handshake_is_read_of_a_pending_connection(server: RpcServer, handler: Handler) -> None:
    with connect(server) as pending:
        with suppress(ConnectionError, ssl.SSLError):
            pending.sendall(b"\x7f" * 100_000_000)
        assert len(read_to_end(pending)) <= HELLO_BYTES
    assert handler.calls == []


def test_pending_connections_take_no_threads_and_end_in_time(handler: Handler, identity: TlsIdentity | None) -> None:
    before = serving_threads()
    with ExitStack() as held, serving(handler, replace(SHORT, handshake_timeout_s=1), identity) as server:
        pending_connections = [held.enter_context(connect(server)) for _ in range(50)]
        for pending in pending_connections:
            pending.sendall(b"s")
            read(pending, HELLO_BYTES)
        assert len(serving_threads() - before) == 1
        require_service(server)
        for pending in pending_connections:
            assert read_to_end(pending) == b""
        require_service(server)


def test_one_pending_connection_too_many_ends_the_oldest(handler: Handler) -> None:
    policy = RpcPolicy(max_pending=3, handshake_timeout_s=10 * LONG_S)
    with ExitStack() as held, serving(handler, policy) as server:
        pending_connections = [held.enter_context(connect(server)) for _ in range(10)]
        for pending in pending_connections[:7]:
            assert len(read_to_end(pending)) == HELLO_BYTES
        require_service(server)
        pending_connections[9].settimeout(0.05)
        assert len(read(pending_connections[9], HELLO_BYTES)) == HELLO_BYTES
        with pytest.raises(TimeoutError):
            pending_connections[9].recv(1)


class Notes(logging.Handler):
    """Waits for messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._arrived = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._arrived:
            self.texts.append(record.getMessage())
            self._arrived.notify_all()

    def wait_for(self, part: str) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: any(part in text for text in self.texts), LONG_S), self.texts


@pytest.fixture
def notes() -> Iterator[Notes]:
    notes = Notes()
    logger = logging.getLogger("statelog.rpc.handshake")
    logger.addHandler(notes)
    yield notes
    logger.removeHandler(notes)


class Piecemeal(socket.socket):
    """Bytes arrive by and by, and sometimes the system was wrong that there are any."""

    reads = 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.reads += 1
        if self.reads == 1:
            raise BlockingIOError
        return super().recv(min(size, 37), flags)


def test_what_comes_behind_a_proof_is_left_to_whom_it_is_for() -> None:
    admitted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    with pending_connections(admitted.put, RpcPolicy(), Listener(Piecemeal)) as (port, _), visit(port) as pending:
        prove(pending, behind=b"a call")
        with admitted.get(timeout=LONG_S) as connection:
            connection.setblocking(True)
            assert connection.recv(100) == b"a call"


@pytest.mark.parametrize(
    "answer",
    [b"", bytes(HELLO_BYTES + PROOF_BYTES), new_hello() + bytes(PROOF_BYTES)],
    ids=["end", "no hello", "wrong proof"],
)
def test_a_pending_connection_who_ends_or_is_wrong_goes_at_once(answer: bytes) -> None:
    """And not only when its time is over."""
    policy = RpcPolicy(handshake_timeout_s=10 * LONG_S)
    with pending_connections(socket.socket.close, policy) as (port, _), visit(port) as pending:
        read(pending, HELLO_BYTES)
        pending.sendall(answer)
        if not answer:
            pending.shutdown(socket.SHUT_WR)
        assert read_to_end(pending) == b""


class Full(socket.socket):
    """It has no room for what is to be sent."""

    def send(self, data: Any, flags: int = 0) -> int:
        return 0


class Broken(socket.socket):
    """Nothing can be sent."""

    def send(self, data: Any, flags: int = 0) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("connections", [Full, Broken])
def test_who_cannot_be_answered_is_sent_away(connections: type[socket.socket]) -> None:
    policy, listener = RpcPolicy(handshake_timeout_s=10 * LONG_S), Listener(connections)
    with pending_connections(socket.socket.close, policy, listener) as (port, _), visit(port) as pending:
        assert read_to_end(pending) == b""


def test_who_goes_before_it_is_answered_costs_no_other_pending_connection_its_place(notes: Notes) -> None:
    listener = Listener(socket.socket, ConnectionAbortedError(), BlockingIOError())
    reset(visit(listener.getsockname()[1]))
    with pending_connections(socket.socket.close, RpcPolicy(), listener) as (port, _), visit(port) as waiting:
        assert len(waiting.recv(1)) == 1
        gone = visit(port)
        gone.recv(1)
        reset(gone)
        with visit(port) as last:
            prove(last)
        waiting.settimeout(0.05)
        assert len(waiting.recv(HELLO_BYTES)) == HELLO_BYTES - 1
        with pytest.raises(TimeoutError):
            waiting.recv(1)
    assert notes.texts == []


class HeldClock(SystemClock):
    """Who looks at it waits while it is held."""

    def __init__(self) -> None:
        self.goes_on, self.is_looked_at = threading.Event(), threading.Event()
        self.goes_on.set()

    def monotonic_s(self) -> float:
        if not self.goes_on.is_set():
            self.is_looked_at.set()
            assert self.goes_on.wait(LONG_S)
        return super().monotonic_s()


def test_a_pending_connection_may_speak_at_the_moment_at_which_it_makes_room(notes: Notes) -> None:
    clock = HeldClock()
    with pending_connections(socket.socket.close, RpcPolicy(max_pending=1), clock=clock) as (port, _):
        clock.goes_on.clear()
        with visit(port) as first:
            assert clock.is_looked_at.wait(LONG_S)
            with visit(port) as second:
                first.sendall(b"s")
                clock.goes_on.set()
                prove(second)
    assert notes.texts == []


class Rounds:
    """How long the thread that accepts waits at most in each round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        waits_s = self._waits_s = queue.SimpleQueue[float | None]()

        class Noted(selectors.DefaultSelector):
            def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
                waits_s.put(timeout)
                return super().select(timeout)

        monkeypatch.setattr(selectors, "DefaultSelector", Noted)

    def next(self) -> list[float | None]:
        """Wait until what has happened by now is seen."""
        while not self._waits_s.empty():
            self._waits_s.get()
        return [self._waits_s.get(timeout=LONG_S) for _ in range(3)]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Rounds:
    return Rounds(monkeypatch)


PAUSE_S = 2.0**-7
TWO_PAUSES = RpcPolicy(accept_backoff_s=2 * PAUSE_S, handshake_timeout_s=2 * PAUSE_S)


def test_times_are_over_when_they_are_and_not_before(notes: Notes, rounds: Rounds) -> None:
    """While nothing can be accepted it is not tried again, and a pending connection has all of its time and no more."""
    listener, clock = Listener(socket.socket, OSError(errno.EMFILE, "too many open files")), ManualClock(1000)
    with pending_connections(socket.socket.close, TWO_PAUSES, listener, clock) as (port, _), visit(port) as pending:
        notes.wait_for("cannot be accepted for now")
        for _ in range(2):
            assert all(wait_s is not None and wait_s <= 2 * PAUSE_S for wait_s in rounds.next())
            assert listener.attempts == 1
            clock.advance(PAUSE_S)
        assert len(read(pending, HELLO_BYTES)) == HELLO_BYTES
        assert listener.attempts == 2
        clock.advance(PAUSE_S)
        rounds.next()
        pending.setblocking(False)
        with pytest.raises(BlockingIOError):
            pending.recv(1)
        pending.settimeout(LONG_S)
        clock.advance(PAUSE_S)
        assert read_to_end(pending) == b""


def test_a_failure_while_nothing_is_accepted_does_not_make_that_longer(notes: Notes, rounds: Rounds) -> None:
    def admit(connection: socket.socket) -> None:
        connection.close()
        raise ZeroDivisionError("a defect")

    listener, clock = Listener(), ManualClock(1000)
    policy = replace(TWO_PAUSES, handshake_timeout_s=LONG_S)
    with pending_connections(admit, policy, listener, clock) as (port, _), visit(port) as oldest, visit(port) as other:
        for pending in (oldest, other):
            pending.recv(1, socket.MSG_PEEK)
        listener.failures.append(OSError(errno.EMFILE, "too many open files"))
        with visit(port) as waiting:
            notes.wait_for("cannot be accepted for now")
            rounds.next()
            clock.advance(PAUSE_S)
            prove(other)
            rounds.next()
            clock.advance(PAUSE_S)
            assert len(read(waiting, HELLO_BYTES)) == HELLO_BYTES


@contextmanager
def no_file_descriptors() -> Iterator[None]:
    """Nothing can be opened meanwhile in this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 1, limits[1]))
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)


def test_connections_are_accepted_again_after_a_lack_of_file_descriptors(handler: Handler, notes: Notes) -> None:
    policy = RpcPolicy(accept_backoff_s=0.01)
    with serving(handler, policy) as server, socket.socket() as waiting:
        waiting.settimeout(LONG_S)
        with no_file_descriptors():
            waiting.connect((HOST, server.port))
            notes.wait_for("cannot be accepted for now")
            waiting.settimeout(0.1)
            with pytest.raises(TimeoutError):
                waiting.recv(1)
        waiting.settimeout(LONG_S)
        assert len(read(waiting, HELLO_BYTES)) == HELLO_BYTES
        notes.wait_for("accepted again")
        require_service(server)
        assert len(notes.texts) == 2, "one message, however often it was tried"


def test_a_pending_connection_makes_room_when_file_descriptors_are_lacking(handler: Handler, notes: Notes) -> None:
    policy = RpcPolicy(accept_backoff_s=0.01, handshake_timeout_s=10 * LONG_S)
    with serving(handler, policy) as server, connect(server) as pending, socket.socket() as waiting:
        read(pending, HELLO_BYTES)
        waiting.settimeout(LONG_S)
        with no_file_descriptors():
            waiting.connect((HOST, server.port))
            assert read_to_end(pending) == b""
            assert len(read(waiting, HELLO_BYTES)) == HELLO_BYTES


def test_who_does_not_take_the_servers_proof_is_not_admitted(caplog: pytest.LogCaptureFixture) -> None:
    class SendsOnce(socket.socket):
        sent = 0

        def send(self, data: Any, flags: int = 0) -> int:
            SendsOnce.sent += 1
            if SendsOnce.sent == 2:
                raise BrokenPipeError
            return super().send(data, flags)

    admitted: list[socket.socket] = []
    with pending_connections(admitted.append, RpcPolicy(), Listener(SendsOnce)) as (port, _), visit(port) as pending:
        hello, own = read(pending, HELLO_BYTES), new_hello()
        pending.sendall(own + make_proof(SECRET, Side.CLIENT, hello, own))
        assert read_to_end(pending) == b""
    assert (SendsOnce.sent, admitted) == (2, [])
    assert caplog.text == "", "it is not a failure of the server"


def test_nothing_runs_while_a_pending_connection_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: queue.SimpleQueue[float | None] = queue.SimpleQueue()

    class Noting(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            waits.put(timeout)
            return super().select(timeout)

    monkeypatch.setattr(selectors, "DefaultSelector", Noting)
    policy = RpcPolicy(handshake_timeout_s=LONG_S)
    with pending_connections(socket.socket.close, policy) as (port, _), visit(port) as pending:
        read(pending, HELLO_BYTES)
        while (wait_s := waits.get(timeout=LONG_S)) is None:
            pass
        assert LONG_S / 2 < wait_s <= LONG_S
