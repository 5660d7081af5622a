"""TLS for the calls: the server makes a certificate when it starts, and its clients accept no other."""

from __future__ import annotations

import secrets
import ssl
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from statelog.errors import ConfigurationError, ErrorKind

_RECORD_BYTES: Final = 1 << 14
"""The largest content of a TLS record."""
_PIECE_BYTES: Final = 1 << 18
"""How many bytes are encrypted at a time, so that a large message is never held twice."""

_NAME: Final = "statelog"
# The certificate is as old as its server, which its clients know. So no clock decides whether it is valid.
_VALID_FROM: Final = datetime(2000, 1, 1)
_VALID_UNTIL: Final = datetime(9999, 12, 31, 23, 59, 59)  # RFC 5280, 4.1.2.5: it has no end.


class Tls:
    """One end of a TLS connection without its socket: takes the bytes that have arrived, and gives the bytes to send.

    Raises ssl.SSLError, an OSError, if the other end breaks the protocol or has another certificate.
    """

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._arrived, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._engine = context.wrap_bio(self._arrived, self._to_send, server_side=is_server)

    def shake_hands(self, arrived: bytes = b"") -> tuple[bool, bytes]:
        """Continue with TLS's handshake; returns whether it is complete, and the bytes to send."""
        self._arrived.write(arrived)
        try:
            self._engine.do_handshake()
            is_complete = True
        except ssl.SSLWantReadError:
            is_complete = False
        return is_complete, self._to_send.read()

    def encrypt(self, data: bytes) -> Iterator[bytes]:
        """Encrypt data, piece by piece; each piece must be sent before the next is asked for."""
        rest = memoryview(data)
        while rest:
            piece, rest = rest[:_PIECE_BYTES], rest[_PIECE_BYTES:]
            while piece:
                piece = piece[self._engine.write(piece) :]
            yield self._to_send.read()

    def take(self, arrived: bytes) -> None:
        """Take bytes that have arrived, for :meth:`decrypt`."""
        self._arrived.write(arrived)

    def decrypt(self, size: int) -> bytes:
        """Return up to `size` bytes of content; none until more bytes have arrived."""
        try:
            return self._engine.read(min(size, _RECORD_BYTES))
        except ssl.SSLWantReadError:
            return b""


@dataclass(frozen=True)
class TlsIdentity:
    """A server's certificate, and the context with its private key, which exists in this process only."""

    certificate: bytes
    """In DER."""
    context: ssl.SSLContext = field(repr=False)

    def accept(self) -> Tls:
        """The server's end of a new connection."""
        return Tls(self.context, is_server=True)


def new_identity() -> TlsIdentity:
    """Make a key and a certificate for it; raises ConfigurationError if the package cryptography is missing."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ConfigurationError(
            "Spark's network encryption is on, so tasks must call the driver with TLS. The driver's certificate needs"
            " the package cryptography, which is not installed.",
            kind=ErrorKind.UNSUPPORTED_SETTING,
            hint="Install it for the driver's interpreter: pip install statelog[tls].",
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), _VALID_FROM, _VALID_UNTIL)
        # It cannot sign others, so clients that trust it trust nothing else.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    password = secrets.token_hex(16).encode()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(password)
    )
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # Each worker has one connection, which it does not resume.
    # Python reads keys from files only. No other user can read this one, and only this process has its password.
    with tempfile.NamedTemporaryFile(prefix="statelog-", suffix=".pem") as file:
        file.write(pem + certificate.public_bytes(serialization.Encoding.PEM))
        file.flush()
        context.load_cert_chain(file.name, password=password)
    return TlsIdentity(certificate.public_bytes(serialization.Encoding.DER), context)


def connect(certificate: bytes) -> Tls:
    """The client's end of a new connection to the server that has this certificate."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # The certificate names no host: it belongs to one process.
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    return Tls(context, is_server=False)


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
