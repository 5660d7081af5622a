"""Calls to the driver: who knows the secret is answered, nobody else, and nobody holds up the others."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from statelog import ConfigurationError, FencedError, Options, ProtocolError, StatelogError
from statelog.clock import SystemClock
from statelog.rpc.calls import RpcClient, RpcServer
from statelog.rpc.channel import ByteBudget, Channel, RpcPolicy
from statelog.rpc.handshake import HELLO_BYTES, PROOF_BYTES, Side, is_proof, make_proof, new_hello
from statelog.rpc.messages import Ack, Acked, Begin, Failure, Ping, Reply, Request, TaskId, Tick, Ticked
from statelog.rpc.tls import TlsIdentity
from statelog.rpc.tls import connect as connect_tls
from statelog.spark.worker.worker import DriverAddress, WorkerProcess
from statelog.testing.query import ManualClock
from tests.attempts import make_begun
from tests.rpc.calls_support import (
    BEGUN,
    HOST,
    LONG_S,
    SECRET,
    SHORT,
    Handler,
    ack,
    client_of,
    connect,
    read,
    read_to_end,
    require_service,
    serving,
    serving_threads,
    soon_s,
)

_Connected = TypeVar("_Connected")
TASK = TaskId("query", "run", "uid", "instance", 3, 1, 77)


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def server(handler: Handler, identity: TlsIdentity | None) -> Iterator[RpcServer]:
    with serving(handler, RpcPolicy(), identity) as server:
        yield server


def authenticated(server: RpcServer) -> socket.socket:
    """A connection that has proved itself, to send over it what no client would."""
    connection = connect(server)
    server_hello, own = read(connection, HELLO_BYTES), new_hello()
    connection.sendall(own + make_proof(SECRET, Side.CLIENT, server_hello, own))
    assert is_proof(read(connection, PROOF_BYTES), SECRET, Side.SERVER, server_hello, own)
    return connection


def open_files() -> set[str]:
    """The numbers of all open files, but for that with which they are listed."""
    numbers = os.listdir("/proc/self/fd")
    return {number for number in numbers if os.path.lexists(f"/proc/self/fd/{number}")}


# ---- Calls ----


def test_calls_and_payloads_arrive(server: RpcServer, handler: Handler) -> None:
    client = client_of(server)
    assert client.call(Begin(TASK, 1, 10, None, "token")) == BEGUN
    big = os.urandom(3_000_000)
    assert client.call(ack(9), big) == Acked()
    assert handler.calls[1] == (ack(9), big)


def test_errors_come_back_as_what_they_were(server: RpcServer) -> None:
    client = client_of(server)
    with pytest.raises(FencedError, match=r"a newer run Hint: Stop\. \[newer-epoch\]"):
        client.call(ack(0))
    with pytest.raises(ProtocolError, match="ZeroDivisionError: a defect"):
        client.call(ack(1))
    assert client.call(ack(9)) == Acked(), "the connection continues"


def test_all_calls_of_a_task_go_over_one_connection(server: RpcServer) -> None:
    process, driver = WorkerProcess(), DriverAddress(HOST, server.port, SECRET, server.certificate)
    client = process.client(driver, Options(), TASK)
    assert client.call(ack(9)) == Acked()
    assert process.client(driver, Options(), TASK) is client
    with pytest.raises(FencedError):
        client.call(ack(0))
    assert process.client(driver, Options(), TASK) is client, "an error of the driver is a reply like others"


def test_a_call_does_not_wait_for_that_of_another_task(identity: TlsIdentity | None) -> None:
    meeting = threading.Barrier(2)

    def handle(request: Request, payload: bytes) -> Reply:
        meeting.wait(LONG_S / 10)
        return Acked()

    with serving(handle, RpcPolicy(), identity) as server:
        clients = [client_of(server) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda client: client.call(ack(9)), clients)) == [Acked()] * 2


def test_without_limits_and_a_clock_of_its_own_either_end_has_the_usual_ones(handler: Handler) -> None:
    server = RpcServer(HOST, 0, SECRET, handler)
    require_service(server)
    server.close()


@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_server_can_have_an_address_of_ipv6(handler: Handler, host: str) -> None:
    """That of all addresses takes IPv4, too."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    server = RpcServer(host, 0, SECRET, handler)
    try:
        for reached in ("::1",) if host == "::1" else ("::1", HOST):
            assert RpcClient(reached, server.port, SECRET).call(ack(9)) == Acked()
    finally:
        server.close()


class HurriedClock(SystemClock):
    """An hour passes whenever somebody looks."""

    hours = 0

    def monotonic_s(self) -> float:
        self.hours += 1
        return super().monotonic_s() + 3600.0 * self.hours


def test_both_ends_go_by_their_clocks(handler: Handler) -> None:
    server = RpcServer(HOST, 0, SECRET, handler, clock=HurriedClock())
    with pytest.raises(ProtocolError, match="cannot be reached"):
        client_of(server)
    server.close()
    with serving(handler, RpcPolicy()) as server, pytest.raises(ProtocolError, match="cannot be reached"):
        client_of(server, clock=HurriedClock())


def test_a_task_waits_for_a_connection_as_long_as_for_the_rest_of_the_handshake(
    server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float | None] = []
    create = socket.create_connection

    def connect(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        timeouts.append(timeout)
        return create(address, timeout)

    monkeypatch.setattr(socket, "create_connection", connect)
    client_of(server, RpcPolicy(handshake_timeout_s=7.0)).close()
    assert timeouts == [7.0]


def test_the_drivers_process_ends_while_tasks_are_connected(server: RpcServer) -> None:
    before = serving_threads()
    client = client_of(server)
    client.call(ack(9))
    [thread] = serving_threads() - before
    assert thread.daemon
    client.close()


def test_a_task_that_ends_is_no_error_of_the_driver(
    handler: Handler, identity: TlsIdentity | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    with serving(handler, RpcPolicy(), identity) as server:
        before = serving_threads()
        client = client_of(server)
        client.call(ack(9))
        threads = serving_threads() - before
        client.close()
        for thread in threads:
            thread.join(LONG_S)
        assert not any(thread.is_alive() for thread in threads), "the driver learns of the end at once"
    assert errors == []


def test_a_task_for_which_there_is_no_thread_is_sent_away(server: RpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "statelog-rpc":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched, connect(server) as connection:
        patched.setattr(threading.Thread, "start", fail)
        hello, own = read(connection, HELLO_BYTES), new_hello()
        connection.sendall(own + make_proof(SECRET, Side.CLIENT, hello, own))
        assert len(read_to_end(connection)) == PROOF_BYTES
    require_service(server)


def test_unreachable_driver_is_named() -> None:
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        port = unused.getsockname()[1]
    with pytest.raises(ProtocolError, match=f"subtask 3: the coordinator at {HOST}:{port} cannot be reached"):
        RpcClient(HOST, port, SECRET, caller="subtask 3")
    with pytest.raises(ProtocolError, match=f"^the coordinator at {HOST}:{port} cannot be reached"):
        RpcClient(HOST, port, SECRET)


def test_bytes_that_are_no_request_are_an_error(server: RpcServer) -> None:
    with authenticated(server) as connection:
        data = b"\x80\x04cos\nsystem\n"
        connection.sendall(struct.pack("!IQ", len(data), 0) + data)
        (size,) = struct.unpack("!Q", read(connection, 8))
        assert b"ProtocolError" in read(connection, size)


def test_a_closed_server_takes_nobody_and_goes_on_with_the_others(
    handler: Handler, identity: TlsIdentity | None
) -> None:
    with serving(handler, RpcPolicy(), identity) as server, connect(server) as pending:
        client = client_of(server)
        read(pending, HELLO_BYTES)
        server.close()
        assert read_to_end(pending) == b""
        with pytest.raises(ProtocolError, match="cannot be reached"):
            client_of(server)
        assert client.call(ack(9)) == Acked()


def test_a_closed_server_leaves_nothing_open(handler: Handler, identity: TlsIdentity | None) -> None:
    files, threads = open_files(), serving_threads()
    server = RpcServer(HOST, 0, SECRET, handler, identity=identity)
    opened = open_files() - files
    [acceptor] = serving_threads() - threads
    assert acceptor.daemon, "a driver that forgets to close it ends all the same"
    assert opened
    server.close()
    assert not acceptor.is_alive()
    assert not open_files() & opened


# ---- Impostors ----


@contextmanager
def impostor(play: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that does with one connection what it is told."""

    def run() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.settimeout(LONG_S)
            play(connection)
            read_to_end(connection)

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(LONG_S)


def guess(connection: socket.socket) -> None:
    connection.sendall(new_hello())
    read(connection, HELLO_BYTES + PROOF_BYTES)
    connection.sendall(bytes(PROOF_BYTES))


def send_the_proof_back(connection: socket.socket) -> None:
    connection.sendall(new_hello())
    answered = read(connection, HELLO_BYTES + PROOF_BYTES)
    connection.sendall(answered[HELLO_BYTES:])


def send_everything_back(connection: socket.socket) -> None:
    connection.sendall(new_hello())
    connection.sendall(read(connection, HELLO_BYTES + PROOF_BYTES))


def know_another_secret(connection: socket.socket) -> None:
    hello = new_hello()
    connection.sendall(hello)
    own = read(connection, HELLO_BYTES + PROOF_BYTES)[:HELLO_BYTES]
    connection.sendall(make_proof(b"w" * 32, Side.SERVER, hello, own))


def know(connection: socket.socket) -> None:
    hello = new_hello()
    connection.sendall(hello)
    own = read(connection, HELLO_BYTES + PROOF_BYTES)[:HELLO_BYTES]
    connection.sendall(make_proof(SECRET, Side.SERVER, hello, own))


def be_of_another_version(connection: socket.socket) -> None:
    hello = b"statelog-rpc-1\0\0" + bytes(HELLO_BYTES - 16)
    connection.sendall(hello)
    own = read(connection, HELLO_BYTES + PROOF_BYTES)[:HELLO_BYTES]
    connection.sendall(make_proof(SECRET, Side.SERVER, hello, own))


@pytest.mark.parametrize(
    "play", [guess, send_the_proof_back, send_everything_back, know_another_secret, be_of_another_version]
)
def test_client_refuses_a_server_that_does_not_know_the_secret(play: Callable[[socket.socket], None]) -> None:
    with impostor(play) as port, pytest.raises(ProtocolError, match=f"at {HOST}:{port} does not know this query's"):
        RpcClient(HOST, port, SECRET)


def test_client_takes_a_server_that_knows_the_secret() -> None:
    """The others are refused for what they do wrong, not for how they are played."""
    with impostor(know) as port:
        RpcClient(HOST, port, SECRET).close()


@pytest.mark.parametrize("words", [bytes(HELLO_BYTES), b""], ids=["of another version", "silent"])
def test_a_connection_that_came_to_nothing_is_closed(words: bytes) -> None:
    """At once, not when the error is forgotten."""
    ended: list[bytes] = []

    def play(connection: socket.socket) -> None:
        connection.sendall(words)
        connection.settimeout(LONG_S)
        ended.append(connection.recv(1))

    with impostor(play) as port:
        with pytest.raises(ProtocolError) as caught:
            RpcClient(HOST, port, SECRET, RpcPolicy(handshake_timeout_s=0.1))
        end_s = time.monotonic() + LONG_S / 10
        while not ended and time.monotonic() < end_s:
            time.sleep(0.005)
        assert ended == [b""], caught


def test_the_proof_that_a_client_gave_elsewhere_is_worth_nothing() -> None:
    """Somebody who passes a client's words on to another client learns no proof of a server."""
    heard: list[bytes] = []

    def listen(connection: socket.socket) -> None:
        connection.sendall(hello)
        heard.append(read(connection, HELLO_BYTES + PROOF_BYTES))

    def repeat(connection: socket.socket) -> None:
        connection.sendall(hello)
        read(connection, HELLO_BYTES + PROOF_BYTES)
        connection.sendall(heard[0][HELLO_BYTES:])

    hello = new_hello()
    short = RpcPolicy(handshake_timeout_s=0.2)
    with impostor(listen) as port, pytest.raises(ProtocolError, match="cannot be reached"):
        RpcClient(HOST, port, SECRET, short)
    with impostor(repeat) as port, pytest.raises(ProtocolError, match="does not know"):
        RpcClient(HOST, port, SECRET, short)


def test_the_proof_that_a_server_gave_to_another_client_is_worth_nothing(server: RpcServer) -> None:
    with connect(server) as connection:
        hello, own = read(connection, HELLO_BYTES), new_hello()
        connection.sendall(own + make_proof(SECRET, Side.CLIENT, hello, own))
        proof = read(connection, PROOF_BYTES)

    def repeat(connection: socket.socket) -> None:
        connection.sendall(hello)
        read(connection, HELLO_BYTES + PROOF_BYTES)
        connection.sendall(proof)

    with impostor(repeat) as port, pytest.raises(ProtocolError, match="does not know"):
        RpcClient(HOST, port, SECRET)


@pytest.mark.parametrize("said", [b"", b"s", bytes(HELLO_BYTES - 1)])
def test_client_does_not_wait_for_a_server_that_says_nothing(said: bytes) -> None:
    with impostor(lambda connection: connection.sendall(said)) as port, pytest.raises(ProtocolError, match="timed out"):
        RpcClient(HOST, port, SECRET, RpcPolicy(handshake_timeout_s=0.1))


# ---- Deadlines ----


@pytest.mark.parametrize(
    ("request_", "caller"),
    [
        (Begin(TASK, 1, 10, None, "token"), "operator 'uid', subtask 1, batch 3"),
        (Tick("clock", "reader", False), "the clock source reader"),
        (Ping("the doctor"), "the doctor"),
    ],
)
def test_a_call_that_is_not_answered_says_whose_it_was(
    server: RpcServer, handler: Handler, request_: Request, caller: str
) -> None:
    handler.waits.clear()
    client = client_of(server, RpcPolicy(call_timeout_s=0.1))
    where = f"{caller}: the coordinator at {HOST}:{server.port} has not answered within 0.1 s"
    with pytest.raises(ProtocolError, match=where) as caught:
        client.call(request_)
    assert "driver_timeout_s" in caught.value.hint
    handler.waits.set()
    assert client.is_broken, "a late answer would be taken for that to the next call"
    with pytest.raises(ProtocolError, match="cannot be reached"):
        client.call(ack(9))
    require_service(server)


def test_a_driver_whose_machine_is_gone_is_unreachable_and_not_late(
    server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system has asked for a minute whether it is there, and reports a timeout of its own."""

    def give_up(channel: Channel, size: int, deadline_s: float) -> bytes:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    client = client_of(server)
    monkeypatch.setattr(Channel, "receive", give_up)
    with pytest.raises(ProtocolError, match="cannot be reached: TimeoutError") as caught:
        client.call(ack(9))
    assert "spark.statelog.coordinator.host" in caught.value.hint


def test_the_option_says_how_long_a_task_waits(server: RpcServer, handler: Handler) -> None:
    process = WorkerProcess()
    driver = DriverAddress(HOST, server.port, SECRET, server.certificate)
    patient, hasty = (Options(driver_timeout_s=seconds) for seconds in (LONG_S, 0.1))
    kept = process.client(driver, patient, TASK)
    handler.waits.clear()
    with pytest.raises(ProtocolError, match="has not answered within 0.1 s"):
        process.client(driver, hasty, TASK).call(ack(9))
    handler.waits.set()
    assert process.client(driver, patient, TASK) is kept
    assert process.client(driver, hasty, TASK).call(Tick("clock", "reader", False)) == Ticked(True), (
        "over a new connection"
    )


def test_a_task_that_cannot_connect_says_whose_it_is(server: RpcServer) -> None:
    server.close()
    with pytest.raises(ProtocolError, match="^operator 'uid', subtask 1, batch 3: the coordinator at .* cannot be"):
        WorkerProcess().client(DriverAddress(HOST, server.port, SECRET, server.certificate), Options(), TASK)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_the_option_must_be_a_time(value: float) -> None:
    with pytest.raises(ConfigurationError, match="driver_timeout_s"):
        Options(driver_timeout_s=value)


def test_a_driver_that_stops_reading_is_noticed() -> None:
    def know(connection: socket.socket) -> None:
        hello = new_hello()
        connection.sendall(hello)
        own = read(connection, HELLO_BYTES + PROOF_BYTES)[:HELLO_BYTES]
        connection.sendall(make_proof(SECRET, Side.SERVER, hello, own))
        done.wait(LONG_S)

    done = threading.Event()
    with impostor(know) as port:
        client = RpcClient(HOST, port, SECRET, RpcPolicy(call_timeout_s=0.1))
        with pytest.raises(ProtocolError, match="has not answered within"):
            client.call(ack(9), bytes(100_000_000))
        done.set()


def test_an_interrupted_call_breaks_the_connection(server: RpcServer) -> None:
    class Interrupted:
        def __bytes__(self) -> bytes:
            raise KeyboardInterrupt

        def __len__(self) -> int:
            return 1 << 20

    client = client_of(server)
    with pytest.raises(TypeError):
        client.call(ack(9), Interrupted())  # type: ignore[arg-type]  # stands for what may happen between two calls
    assert client.is_broken


@pytest.mark.parametrize("sent", [b"\0", struct.pack("!IQ", 1000, 0) + b"x", struct.pack("!IQ", 0, 10) + b"x"])
def test_a_request_that_is_begun_must_be_sent_in_time(
    handler: Handler, identity: TlsIdentity | None, sent: bytes
) -> None:
    with serving(handler, SHORT, identity) as server, authenticated(server) as connection:
        connection.sendall(sent)
        assert read_to_end(connection) == b""
        require_service(server)


def test_an_idle_client_is_kept(handler: Handler, identity: TlsIdentity | None) -> None:
    with serving(handler, SHORT, identity) as server:
        client = client_of(server)
        assert client.call(ack(9)) == Acked()
        with authenticated(server) as other:  # Its end comes after the time that any request would have.
            other.sendall(struct.pack("!IQ", 1, 0))
            assert read_to_end(other) == b""
        assert client.call(ack(9)) == Acked()


def test_a_client_that_does_not_take_its_reply_is_given_up(handler: Handler, identity: TlsIdentity | None) -> None:
    def reply(request: Request, payload: bytes) -> Reply:
        return make_begun(head=bytes(30_000_000))

    with serving(reply, SHORT, identity) as server:
        own = serving_threads()
        with authenticated(server) as connection:
            data = msgspec.msgpack.encode(Begin(TASK, 1, 10, None, "token"))
            connection.sendall(struct.pack("!IQ", len(data), 0) + data)
            assert len(read(connection, 8)) == 8
            for thread in serving_threads() - own:
                thread.join(LONG_S)
            assert serving_threads() <= own


def test_both_ends_ask_whether_the_other_is_there(server: RpcServer) -> None:
    policy = RpcPolicy(keepalive_idle_s=7, keepalive_interval_s=3, keepalive_probes=2)
    with connect(server) as connection:
        Channel(connection, policy, SystemClock())
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        if hasattr(socket, "TCP_KEEPIDLE"):
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            assert [connection.getsockopt(socket.IPPROTO_TCP, name) for name in names] == [7, 3, 2]


# ---- Bytes ----


@pytest.fixture
def ends(identity: TlsIdentity | None) -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the socket at its other end, with Python's own TLS."""
    with socket.create_server((HOST, 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        channel = Channel(near, RpcPolicy(), SystemClock())
        if identity is None:
            with far:
                yield channel, far
            return
        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(channel.begin_tls, connect_tls(identity.certificate), soon_s())
            with identity.context.wrap_socket(far, server_side=True) as private:
                begun.result()
                yield channel, private


def test_no_more_is_received_than_was_asked_for(ends: tuple[Channel, socket.socket]) -> None:
    """What comes behind belongs to the next message."""
    channel, other = ends

    def send() -> None:
        for data in (b"ab", b"cdefgh"):
            other.sendall(data)
            time.sleep(0.02)

    thread = threading.Thread(target=send)
    thread.start()
    assert (channel.receive_next(4, LONG_S), channel.receive(1, soon_s())) == (b"abcd", b"e")
    thread.join()
    other.sendall(b"i")
    assert channel.receive(4, soon_s()) == b"fghi"


def test_a_message_has_a_deadline_of_its_own(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(b"a")
    channel.receive(1, soon_s())
    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.send([bytes(50_000_000)], soon_s(0.1))
    assert time.monotonic() - started_s < LONG_S / 2, "not that of the message before"
    with pytest.raises(TimeoutError):
        channel.receive(1, soon_s(-1.0))


def test_a_message_is_late_at_its_deadline(ends: tuple[Channel, socket.socket]) -> None:
    """Without any time left the socket would not wait, and tell another error."""
    _, other = ends
    clock = ManualClock()
    with pytest.raises(TimeoutError):
        Channel(other, RpcPolicy(), clock).receive(1, clock.monotonic_s())


# ---- Sizes ----


def test_calls_that_are_too_large_are_not_sent(server: RpcServer, handler: Handler) -> None:
    client = client_of(server, RpcPolicy(max_payload_bytes=1000, max_request_bytes=600))
    with pytest.raises(
        ProtocolError, match=r"operator 'uid', subtask 1, batch 3: .* with 1001 more is too large"
    ) as one:
        client.call(ack(9), bytes(1001))
    assert "inline_budget_bytes" in one.value.hint
    with pytest.raises(ProtocolError, match="too large"):
        client.call(ack(9, name="n" * 600), b"")
    assert handler.calls == []
    assert client.call(ack(9), bytes(1000)) == Acked(), "the connection continues"


@pytest.mark.parametrize("sizes", [(1001, 0), (0, 2001), (0xFFFFFFFF, 0), (10, 0xFFFFFFFFFFFFFFFF)])
def test_the_server_reads_no_call_that_is_too_large(handler: Handler, sizes: tuple[int, int]) -> None:
    policy = RpcPolicy(max_request_bytes=1000, max_payload_bytes=2000)
    with serving(handler, policy) as server, authenticated(server) as connection:
        connection.sendall(struct.pack("!IQ", *sizes))
        assert read_to_end(connection) == b""
        require_service(server)


def test_calls_and_replies_of_the_largest_size_pass(handler: Handler, identity: TlsIdentity | None) -> None:
    request, reply = len(msgspec.msgpack.encode(ack(9))), len(msgspec.msgpack.encode(Acked()))
    policy = RpcPolicy(max_request_bytes=request, max_payload_bytes=2000, max_reply_bytes=reply)
    with serving(handler, policy, identity) as server:
        assert client_of(server, policy).call(ack(9), bytes(2000)) == Acked()


def test_a_reply_that_is_too_large_is_an_error(handler: Handler) -> None:
    with serving(handler, RpcPolicy(max_reply_bytes=30)) as server:
        client = client_of(server)
        with pytest.raises(ProtocolError, match=r"reply would have \d+ bytes; the limit is 30"):
            client.call(Begin(TASK, 1, 10, None, "token"))
        assert client.call(ack(9)) == Acked()
        picky = client_of(server, RpcPolicy(max_reply_bytes=10))
        with pytest.raises(ProtocolError, match="operator 'uid', subtask 1, batch 3: .* is larger than 10"):
            picky.call(ack(9))
        assert picky.is_broken


def test_what_is_in_flight_is_bounded_by_bytes() -> None:
    """Of four calls three may be handled at a time, so four never meet."""
    meeting = threading.Barrier(4)
    met: list[bool] = []

    def handle(request: Request, payload: bytes) -> Reply:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)
            met.append(True)
        return Acked()

    with serving(handle, RpcPolicy(max_in_flight_bytes=3_900_000)) as server:
        clients = [client_of(server) for _ in range(4)]
        half = ack(9, name="n" * 500_000), bytes(500_000)
        threads = [threading.Thread(target=client.call, args=half) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        assert met == []
        assert clients[0].call(ack(9), bytes(5_000_000)) == Acked(), "one that is larger passes alone"


def test_bytes_are_given_back_after_an_error() -> None:
    budget = ByteBudget(10)
    with pytest.raises(ZeroDivisionError), budget.holding(10):
        raise ZeroDivisionError
    with budget.holding(4), budget.holding(6):
        pass


# ---- Anything ----

FUZZED = replace(SHORT, max_request_bytes=2000, max_payload_bytes=2000, max_pending=8, handshake_timeout_s=0.05)
REQUESTS = [
    msgspec.msgpack.encode(one) for one in (ack(9), ack(0), Begin(TASK, 1, 10, None, "token"), Tick("c", "r", True))
]


@st.composite
def mutated(draw: st.DrawFn, healthy: bytes) -> bytes:
    """Some bytes with a few of them changed, removed or doubled."""
    data = bytearray(healthy)
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["change", "cut", "insert", "end"])):
            case "change" if data:
                data[place] = draw(st.integers(0, 255))
            case "cut":
                del data[place : place + draw(st.integers(1, 8))]
            case "insert":
                data[place:place] = draw(st.binary(min_size=1, max_size=8))
            case "end":
                del data[place:]
    return bytes(data)


@st.composite
def calls(draw: st.DrawFn) -> bytes:
    """A few calls, each with something wrong with it or not."""
    sent = b""
    for _ in range(draw(st.integers(1, 3))):
        request = draw(st.sampled_from(REQUESTS).flatmap(mutated))
        payload = draw(st.binary(max_size=50))
        honest = struct.pack("!IQ", len(request), len(payload))
        sent += draw(st.one_of(st.just(honest), mutated(honest))) + request + payload
    return sent


def talk(connection: socket.socket, data: bytes, *, ends: bool) -> None:
    """Send all, and end or wait until the server does."""
    with connection, suppress(ConnectionError, ssl.SSLEOFError):  # which the server may have ended already
        connection.sendall(data)
        if ends:
            with suppress(OSError):  # The server may have ended it already.
                connection.shutdown(socket.SHUT_WR)
        read_to_end(connection)


def greeted(server: RpcServer) -> tuple[socket.socket, bytes]:
    """A connection with the server's hello."""
    connection = connect(server)
    hello = read(connection, HELLO_BYTES)
    assert len(hello) == HELLO_BYTES
    return connection, hello


def patiently(begin: Callable[[RpcServer], _Connected], server: RpcServer) -> _Connected:
    """Begin a connection; on a busy machine that may take longer than the server gives it."""
    for _ in range(20):
        with suppress(OSError, AssertionError):
            return begin(server)
    return begin(server)


def test_any_bytes_leave_the_server_as_it_was(handler: Handler, identity: TlsIdentity | None) -> None:
    before = serving_threads()
    with serving(handler, FUZZED, identity) as server:
        own = serving_threads()

        @settings(max_examples=30, deadline=None)
        @given(st.data(), st.booleans())
        def fuzz(data: st.DataObject, ends: bool) -> None:
            match data.draw(st.sampled_from(["bytes", "handshake", "calls"])):
                case "bytes":
                    talk(patiently(connect, server), data.draw(st.binary(max_size=300)), ends=ends)
                case "handshake":
                    (connection, server_hello), hello = patiently(greeted, server), new_hello()
                    right = hello + make_proof(SECRET, Side.CLIENT, server_hello, hello)
                    sent = data.draw(mutated(right))
                    talk(connection, sent, ends=ends or sent == right)
                case "calls":
                    talk(patiently(authenticated, server), data.draw(calls()), ends=True)
            require_service(server, attempts=5)  # on a busy machine a handshake may take longer than it is given
            for thread in serving_threads() - own:
                thread.join(LONG_S)
            assert serving_threads() <= own

        fuzz()
        assert {type(request) for request, _ in handler.calls} <= {Ack, Begin, Tick}
    for thread in serving_threads() - before:
        thread.join(LONG_S)
    assert serving_threads() <= before


def test_who_waits_for_room_goes_on_once_there_is_some() -> None:
    budget = ByteBudget(10)

    def hold() -> None:
        with budget.holding(6):
            pass

    other = threading.Thread(target=hold, daemon=True)
    with budget.holding(5):
        other.start()
        other.join(0.2)
        assert other.is_alive()
    other.join(10)
    assert not other.is_alive()


# ---- Messages of another form ----

MALFORMED = [
    b"", b"\xc1", msgspec.msgpack.encode({"type": "nothing"}), msgspec.msgpack.encode([1]), b"\x91" * 5000 + b"\x01",
    b"\x81\xa4type\xa4\xff\xff\xff\xff", b"\x82\xa4type\xa4ping\xa4name\xa1\xff",
]  # fmt: skip


@pytest.mark.parametrize("request_bytes", MALFORMED)
def test_a_malformed_request_is_answered_with_an_error_of_statelog(
    request_bytes: bytes, server: RpcServer, caplog: pytest.LogCaptureFixture
) -> None:
    with authenticated(server) as connection:
        connection.sendall(struct.pack("!IQ", len(request_bytes), 0) + request_bytes)
        (size,) = struct.unpack("!Q", read(connection, 8))
        reply = msgspec.msgpack.Decoder(Reply).decode(read(connection, size))
    assert isinstance(reply, Failure)
    assert reply.error == "ProtocolError"
    assert "a request of an unknown form" in reply.message
    assert "Traceback" not in caplog.text


def called(reply: bytes) -> object:
    """What a client makes of a reply."""

    def answer(connection: socket.socket) -> None:
        know(connection)
        (request_bytes, _) = struct.unpack("!IQ", read(connection, 12))
        read(connection, request_bytes)
        connection.sendall(struct.pack("!Q", len(reply)) + reply)

    with impostor(answer) as port:
        client = RpcClient(HOST, port, SECRET)
        try:
            return client.call(Ping("a test"))
        finally:
            client.close()


@pytest.mark.parametrize("reply", [*MALFORMED, b"\x82\xa4type\xa7failure\xa5error\xa1\xff"])
def test_a_malformed_reply_is_an_error_of_statelog(reply: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be reached: .*Error"):
        called(reply)


def test_an_error_of_a_kind_that_only_the_other_version_knows() -> None:
    with pytest.raises(StatelogError, match="something new"):
        called(msgspec.msgpack.encode(Failure("NewError", "something new", "new-kind", "")))
