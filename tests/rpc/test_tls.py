"""Calls with TLS: nothing is readable on the wire, and no pending connection holds up the others."""

from __future__ import annotations

import os
import re
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from statelog import ConfigurationError, ErrorKind, ProtocolError
from statelog.clock import SystemClock
from statelog.rpc.calls import RpcClient
from statelog.rpc.channel import Channel, RpcPolicy
from statelog.rpc.handshake import HELLO_BYTES, PROOF_BYTES, Side, is_proof, make_proof, new_hello
from statelog.rpc.tls import Tls, TlsIdentity, connect, new_identity
from statelog.spark.driver.encryption import encrypts_traffic
from statelog.spark.driver.endpoint import require_endpoint
from tests.rpc.calls_support import (
    HOST,
    LONG_S,
    SECRET,
    SHORT,
    Handler,
    ack,
    python_tls,
    read,
    read_to_end,
    require_service,
    serving,
    serving_threads,
    soon_s,
)
from tests.rpc.calls_support import connect as connect_to

PATIENT = RpcPolicy(handshake_timeout_s=10 * LONG_S)
CHANGE_CIPHER_SPEC = b"\x14\x03\x03\x00\x01\x01"


@pytest.fixture
def handler() -> Handler:
    return Handler()


def plain(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=LONG_S)


# ---- The wire ----


@contextmanager
def recorded(port: int) -> Iterator[tuple[int, bytearray]]:
    """A port that passes one connection on, and all bytes that have passed in either direction."""
    seen = bytearray()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def run() -> None:
        near, _ = listener.accept()
        with near, plain(port) as far:
            back = threading.Thread(target=pass_on, args=(far, near))
            back.start()
            pass_on(near, far)
            back.join(LONG_S)

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()[1], seen
        thread.join(LONG_S)


def test_only_with_tls_nobody_can_read_calls_on_the_wire(handler: Handler, identity: TlsIdentity | None) -> None:
    payload = b"the-users-value" * 10_000
    with serving(handler, RpcPolicy(), identity) as server, recorded(server.port) as (port, seen):
        client = RpcClient(HOST, port, SECRET, certificate=server.certificate)
        client.call(ack(9, name="the-objects-name"), payload)
        with pytest.raises(Exception, match="a newer run"):
            client.call(ack(0))
        client.close()
    assert handler.calls[0] == (ack(9, name="the-objects-name"), payload)
    assert len(seen) > len(payload)
    words = [b"the-users-value", b"the-objects-name", b"a newer run", b"statelog-rpc"]
    assert [word in seen for word in words] == [identity is None] * len(words)


@pytest.mark.parametrize("place", [0, 5, 500, -1])
def test_what_was_changed_on_the_way_is_refused(tls_identity: TlsIdentity, place: int) -> None:
    client, server = connect(tls_identity.certificate), tls_identity.accept()
    shake(client, server)
    data = bytearray(b"".join(client.encrypt(bytes(1000))))
    data[place] ^= 1
    server.take(bytes(data))
    with pytest.raises(OSError, match="SSL"):
        server.decrypt(1000)


def test_a_record_that_comes_by_and_by_has_the_messages_deadline(tls_identity: TlsIdentity) -> None:
    """Not one of its own for every byte."""
    with socket.create_server((HOST, 0)) as listener, socket.create_connection(listener.getsockname()) as near:
        far, _ = listener.accept()
        server, channel = tls_identity.accept(), Channel(near, RpcPolicy(), SystemClock())
        is_over = threading.Event()

        def trickle() -> None:
            is_complete = False
            while not is_complete:
                is_complete, to_send = server.shake_hands(far.recv(1 << 16))
                far.sendall(to_send)
            for byte in b"".join(server.encrypt(bytes(1000))):
                if is_over.wait(0.01):
                    return
                far.sendall(bytes([byte]))

        thread = threading.Thread(target=trickle)
        thread.start()
        channel.begin_tls(connect(tls_identity.certificate), soon_s())
        with pytest.raises(TimeoutError):
            channel.receive(1000, soon_s(0.2))
        is_over.set()
        thread.join(LONG_S)
        far.close()


def test_a_large_message_is_not_held_twice(tls_identity: TlsIdentity) -> None:
    client, server = connect(tls_identity.certificate), tls_identity.accept()
    shake(client, server)
    pieces = list(client.encrypt(bytes(10_000_000)))
    assert max(map(len, pieces)) < 300_000
    for piece in pieces:
        server.take(piece)
    received = 0
    while content := server.decrypt(1 << 20):
        received += len(content)
    assert received == 10_000_000


def shake(client: Tls, server: Tls) -> None:
    are_complete, to_server = client.shake_hands()
    while not are_complete:
        _, to_client = server.shake_hands(to_server)
        are_complete, to_server = client.shake_hands(to_client)
    assert server.shake_hands(to_server) == (True, b"")


# ---- The certificate ----


def test_a_server_with_another_certificate_is_refused(handler: Handler, tls_identity: TlsIdentity) -> None:
    with serving(handler, PATIENT, new_identity()) as server:
        where = f"^subtask 3: the coordinator at {HOST}:{server.port} lacks the certificate of this query's driver"
        with pytest.raises(ProtocolError, match=where) as caught:
            RpcClient(HOST, server.port, SECRET, certificate=tls_identity.certificate, caller="subtask 3")
        assert "restart the query" in caught.value.hint
        require_service(server)


def test_a_certificate_that_the_right_one_vouches_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, other = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    monkeypatch.setattr(ec, "generate_private_key", lambda curve: key)
    right = new_identity().certificate
    name = x509.load_der_x509_certificate(right).subject
    wrong = (
        x509.CertificateBuilder(name, x509.Name([]), other.public_key(), 7)
        .not_valid_before(x509.load_der_x509_certificate(right).not_valid_before_utc)
        .not_valid_after(x509.load_der_x509_certificate(right).not_valid_after_utc)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    own = other.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "pem").write_bytes(own + wrong.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "pem")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(connect(right), Tls(context, is_server=True))


def test_every_server_has_a_key_of_its_own(tls_identity: TlsIdentity) -> None:
    assert new_identity().certificate != tls_identity.certificate
    assert "key" not in repr(tls_identity)


def test_the_private_key_is_never_on_a_disk_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path, bytes, int]] = []
    load = ssl.SSLContext.load_cert_chain

    def look(context: ssl.SSLContext, path: str, **more: Any) -> None:
        seen.append((Path(path), Path(path).read_bytes(), stat.S_IMODE(os.stat(path).st_mode)))
        load(context, path, **more)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", look)
    new_identity()
    [(path, data, mode)] = seen
    assert re.findall(rb"-----BEGIN (.*)-----", data) == [b"ENCRYPTED PRIVATE KEY", b"CERTIFICATE"]
    assert (mode, path.exists()) == (0o600, False)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    conf = {"spark.authenticate": "true", AES: "true"}
    context = types.SimpleNamespace(master="local[2]", applicationId="app", getConf=lambda: conf)
    session: Any = types.SimpleNamespace(sparkContext=context)
    with pytest.raises(ConfigurationError, match="the package cryptography, which is not installed") as caught:
        require_endpoint(session)
    assert "pip install statelog[tls]" in caught.value.hint


# ---- Ends that do not fit ----


def test_a_client_without_tls_says_what_may_be_wrong(handler: Handler, tls_identity: TlsIdentity) -> None:
    with serving(handler, PATIENT, tls_identity) as server:
        with pytest.raises(ProtocolError, match="cannot be reached: TimeoutError") as caught:
            RpcClient(HOST, server.port, SECRET, RpcPolicy(handshake_timeout_s=0.1))
        assert "an application that encrypts its calls" in caught.value.hint
        require_service(server)


def test_a_server_without_tls_is_refused(handler: Handler, tls_identity: TlsIdentity) -> None:
    with serving(handler, RpcPolicy()) as server:
        with pytest.raises(ProtocolError, match=f"{HOST}:{server.port} does not answer with TLS"):
            RpcClient(HOST, server.port, SECRET, certificate=tls_identity.certificate)
        require_service(server)


def test_older_versions_of_tls_are_refused(handler: Handler, tls_identity: TlsIdentity) -> None:
    old = python_tls(tls_identity.certificate)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(handler, PATIENT, tls_identity) as server:
        with plain(server.port) as pending, pytest.raises(OSError, match=r".") as caught:
            old.wrap_socket(pending)
        assert not isinstance(caught.value, TimeoutError)
        require_service(server)


# ---- PendingConnections ----


def client_hello() -> bytes:
    return Tls(ssl.create_default_context(), is_server=False).shake_hands()[1]


def test_pending_connections_within_the_handshake_hold_up_nobody_and_end_in_time(
    handler: Handler, tls_identity: TlsIdentity
) -> None:
    hello, before = client_hello(), serving_threads()
    with ExitStack() as held, serving(handler, replace(SHORT, handshake_timeout_s=1), tls_identity) as server:
        pending_connections = [held.enter_context(plain(server.port)) for _ in range(30)]
        for number, pending in enumerate(pending_connections):
            pending.sendall(hello[: number * len(hello) // 29])
        for _ in range(3):
            require_service(server)
        assert len(serving_threads() - before) <= 4
        for pending in pending_connections:
            read_to_end(pending)  # ends
        require_service(server)


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("!BHH", 22, 0x0303, 1 << 14) + b"\x01" + (100_000).to_bytes(3, "big") + bytes((1 << 14) - 4),
        CHANGE_CIPHER_SPEC * 10_000,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["a long hello", "endless records", "no TLS"],
)
def test_what_a_pending_connection_sends_is_bounded(handler: Handler, tls_identity: TlsIdentity, sent: bytes) -> None:
    with serving(handler, PATIENT, tls_identity) as server, plain(server.port) as pending:
        with suppress(ConnectionError):
            pending.sendall(sent)
            pending.sendall(sent[:1])
        read_to_end(pending)  # at once, not when its time is over
        require_service(server)


def test_what_a_pending_connection_sends_after_tls_s_handshake_is_bounded_too(
    handler: Handler, tls_identity: TlsIdentity
) -> None:
    client = connect(tls_identity.certificate)
    with serving(handler, PATIENT, tls_identity) as server, plain(server.port) as pending:
        is_complete, to_send = client.shake_hands()
        while not is_complete:
            pending.sendall(to_send)
            is_complete, to_send = client.shake_hands(pending.recv(1 << 16))
        pending.sendall(to_send)
        with suppress(ConnectionError):
            pending.sendall(struct.pack("!BHH", 23, 0x0303, 1 << 14) + bytes((1 << 14) - 100))
        read_to_end(pending)  # It would wait for the end of the record.
        require_service(server)


def test_an_answer_may_come_in_many_records(handler: Handler, tls_identity: TlsIdentity) -> None:
    with serving(handler, PATIENT, tls_identity) as server, connect_to(server) as connection:
        hello, own = read(connection, HELLO_BYTES), new_hello()
        for byte in own + make_proof(SECRET, Side.CLIENT, hello, own):
            connection.sendall(bytes([byte]))
        assert is_proof(read(connection, PROOF_BYTES), SECRET, Side.SERVER, hello, own)


# ---- Settings ----

AES, SASL, SSL, AUTHENTICATE = (
    "spark.network.crypto.enabled",
    "spark.authenticate.enableSaslEncryption",
    "spark.ssl.rpc.enabled",
    "spark.authenticate",
)


@pytest.mark.parametrize(
    ("names", "encrypts"),
    [
        ([], False),
        ([AUTHENTICATE], False),
        (["spark.ssl.enabled", "spark.ssl.ui.enabled"], False),
        (["spark.io.encryption.enabled"], False),
        ([AUTHENTICATE, AES], True),
        ([AUTHENTICATE, SASL], True),
        ([SSL], True),
        ([SSL, AES], True),
    ],
)
def test_calls_are_encrypted_if_sparks_are(names: list[str], encrypts: bool) -> None:
    assert encrypts_traffic(dict.fromkeys(names, "TRUE")) is encrypts
    assert encrypts_traffic(dict.fromkeys(names, "false")) is False


@pytest.mark.parametrize("name", [AES, SASL])
def test_encryption_without_authentication_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is on and spark.authenticate is not") as caught:
        encrypts_traffic({name: "true"})
    assert caught.value.kind is ErrorKind.UNSUPPORTED_SETTING


def test_each_application_of_a_process_gets_its_own_endpoint() -> None:
    """In a process of its own, whose endpoint is no other test's."""
    script = """
import socket, types
from statelog.spark.driver.endpoint import require_endpoint
def found_for(application, master="local[2]", **conf):
    conf = {name.replace("_", "."): value for name, value in conf.items()}
    context = types.SimpleNamespace(master=master, applicationId=application, getConf=lambda: conf)
    return require_endpoint(types.SimpleNamespace(sparkContext=context))
with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
fixed = {"spark_statelog_coordinator_port": port}
encrypted = {"spark_authenticate": "true", "spark_network_crypto_enabled": "true", **fixed}
_, clear = found_for("1", **fixed)
_, first = found_for("2", **encrypted)
assert found_for("2", **encrypted)[1] is first
assert (clear.certificate, bool(first.certificate), first.port == clear.port) == (b"", True, True)
host, other = found_for("3", "spark://here:7077", spark_driver_host="127.0.0.2")
assert (host, other.certificate, other.secret == clear.secret) == ("127.0.0.2", b"", False)
socket.create_connection((host, other.port)).close()
if socket.has_dualstack_ipv6():
    host, sixth = found_for("4", "spark://here:7077", spark_driver_host="[::1]")
    socket.create_connection((host, sixth.port)).close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
