"""Calls from Python workers to the driver: messages over TCP or TLS, after both sides prove that they know a secret.

Measured on one machine, a call takes a third of the time of one with pyarrow.flight, for small and for large messages
(``docs/design/0001-commit-protocol.md`` has the figures). Received bytes are never unpickled.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from statelog.clock import Clock, SystemClock
from statelog.errors import ErrorKind, ProtocolError, StatelogError, error_from_parts
from statelog.log_fields import get_logger
from statelog.rpc.channel import ByteBudget, Channel, RpcPolicy, SilentError
from statelog.rpc.handshake import PendingConnections, prove
from statelog.rpc.messages import Failure, Ping, Reply, Request, Tick
from statelog.sealed import MALFORMED

if TYPE_CHECKING:
    from statelog.rpc.tls import Tls, TlsIdentity

_log = get_logger(__name__)

_BACKLOG: Final = 512
_CLOSE_TIMEOUT_S: Final = 5.0
_BEAT_TIMEOUT_S: Final = 0.1
_LARGE_BYTES: Final = 1 << 16
"""A call of this many bytes may take so long to arrive that the client needs beats in the meantime."""

_CALL: Final = struct.Struct("!IQ")
"""Header of a call: size of the request, and of its payload, in bytes."""
_REPLY: Final = struct.Struct("!Q")
"""Header of a reply: its size in bytes."""
_BEAT: Final = (1 << 64) - 1
"""In place of the size: the call waits for room, is arriving or is being handled."""

_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(Request)
_replies: Final = msgspec.msgpack.Decoder(Reply)

Handler = Callable[[Request, bytes], Reply]


class RpcServer:
    """Answers calls, in one thread per connection that has proved that it knows the secret.

    Port 0 takes a free port. The secret is never sent: client and server prove to each other that they know it. With an
    `identity` all connections use TLS. Several threads call `handle`; one of statelog's errors becomes the reply, any
    other exception is logged and becomes a :class:`ProtocolError`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        handle: Handler,
        policy: RpcPolicy | None = None,
        clock: Clock | None = None,
        *,
        identity: TlsIdentity | None = None,
    ) -> None:
        self._handle = handle
        self._policy = policy or RpcPolicy()
        self._clock = clock or SystemClock()
        self._in_flight = ByteBudget(self._policy.max_in_flight_bytes)
        self._beats = _Beats(self._policy, self._clock)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=host == "::")
        self.port: int = listener.getsockname()[1]
        self.certificate = b"" if identity is None else identity.certificate
        self._pending = PendingConnections(listener, secret, self._admit, self._policy, self._clock, identity)

    def _admit(self, connection: socket.socket, tls: Tls | None) -> None:
        try:
            threading.Thread(target=self._serve, args=(connection, tls), name="statelog-rpc", daemon=True).start()
        except RuntimeError as error:  # There are already too many threads.
            _log.warning("a connection of a task was closed: %s", error)
            connection.close()

    def _serve(self, connection: socket.socket, tls: Tls | None) -> None:
        with connection:
            try:
                channel = Channel(connection, self._policy, self._clock, tls)
                while self._serve_call(channel):
                    pass
            except (EOFError, OSError) as error:
                _log.debug("a connection of a task ended: %s", error)

    def _serve_call(self, channel: Channel) -> bool:
        """Answer one call; False if it is larger than the limits."""
        policy = self._policy
        request_bytes, payload_bytes = _CALL.unpack(channel.receive_next(_CALL.size, policy.transfer_timeout_s))
        if request_bytes > policy.max_request_bytes or payload_bytes > policy.max_payload_bytes:
            _log.warning("a task's call was refused as too large: %d and %d bytes", request_bytes, payload_bytes)
            return False
        size = request_bytes + payload_bytes
        with self._in_flight.holding(size, lambda: self._beats.during(channel)):
            deadline_s = self._clock.monotonic_s() + policy.transfer_timeout_s
            arrives = self._beats.while_receiving(channel) if size > _LARGE_BYTES else None
            request = channel.receive(request_bytes, deadline_s, arrives)
            payload = channel.receive(payload_bytes, deadline_s, arrives)
            self._beats.begin(channel)
            try:
                reply = self._answer(request, payload)
            finally:
                self._beats.end(channel)
        channel.send([_REPLY.pack(len(reply)), reply], self._clock.monotonic_s() + policy.transfer_timeout_s)
        return True

    def _answer(self, request: bytes, payload: bytes) -> bytes:
        reply = _encoder.encode(self._reply(request, payload))
        limit = self._policy.max_reply_bytes
        if len(reply) <= limit:
            return reply
        message = f"The coordinator's reply would have {len(reply)} bytes; the limit is {limit}."
        return _encoder.encode(Failure("ProtocolError", message, str(ErrorKind.RPC), "Please report it."))

    def _reply(self, request: bytes, payload: bytes) -> Reply:
        try:
            decoded = _requests.decode(request)
        except MALFORMED as error:
            _log.warning("a task's call is malformed: %s", error)
            message = f"The coordinator was sent a request of an unknown form: {error}."
            hint = "Make sure that driver and executors run the same version of statelog."
            return Failure("ProtocolError", message, str(ErrorKind.RPC), hint)
        try:
            return self._handle(decoded, payload)
        except StatelogError as error:
            return Failure(type(error).__name__, error.message, str(error.kind), error.hint)
        except Exception as error:
            _log.exception("a task's call failed")
            message = f"The coordinator failed: {type(error).__name__}: {error}."
            return Failure("ProtocolError", message, str(ErrorKind.RPC), "See the traceback in the driver's log.")

    def close(self) -> None:
        """Stop listening; open connections stay open until their clients end."""
        self._pending.close(_CLOSE_TIMEOUT_S)
        self._beats.close()


class _Beats:
    """Tells clients every `beat_s` that their calls have not been lost.

    A thread sends the beats while a connection's own thread waits or works. Otherwise a client could not distinguish a
    long wait from dropped packets, which the operating system of either end sends again at ever longer intervals.
    """

    def __init__(self, policy: RpcPolicy, clock: Clock) -> None:
        self._beat_s = policy.beat_s
        self._clock = clock
        self._waiting: dict[Channel, float] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="statelog-rpc-beats", daemon=True).start()

    @contextmanager
    def during(self, channel: Channel) -> Iterator[None]:
        """Send beats during the block."""
        self.begin(channel)
        try:
            yield
        finally:
            self.end(channel)

    def begin(self, channel: Channel) -> None:
        """Begin to send beats: until :meth:`end`, nothing else may use the channel."""
        with self._lock:
            self._waiting[channel] = self._clock.monotonic_s() + self._beat_s

    def end(self, channel: Channel) -> None:
        """Send no more beats, once one that is on its way has been sent."""
        with self._lock:
            self._waiting.pop(channel, None)

    def while_receiving(self, channel: Channel) -> Callable[[], None]:
        """A function that sends a beat if the last one was long ago; for the channel's own thread."""
        due_s = self._clock.monotonic_s() + self._beat_s

        def beat_if_due() -> None:
            nonlocal due_s
            now_s = self._clock.monotonic_s()
            if now_s >= due_s:
                due_s = now_s + self._beat_s
                self._beat(channel)

        return beat_if_due

    def _run(self) -> None:
        while not self._closing.wait(self._beat_s / 4):
            with self._lock:
                now_s = self._clock.monotonic_s()
                for channel in [channel for channel, due_s in self._waiting.items() if due_s <= now_s]:
                    self._waiting[channel] = now_s + self._beat_s
                    self._beat(channel)

    def _beat(self, channel: Channel) -> None:
        try:
            # There is room, unless the client reads nothing: then part of a beat may be sent, and all else is lost.
            channel.send([_REPLY.pack(_BEAT)], self._clock.monotonic_s() + _BEAT_TIMEOUT_S)
        except OSError:
            channel.shut_down()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()


class RpcClient:
    """A connection to the driver, for one thread at a time.

    If the driver is silent for `silence_s`, the call is repeated on a new connection, until its time is over.

    With the server's `certificate`, the connection uses TLS, and any other server is refused. `caller` names
    the client in messages. Raises ProtocolError if the driver cannot be reached or does not know the secret.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        policy: RpcPolicy | None = None,
        *,
        certificate: bytes = b"",
        caller: str = "",
        clock: Clock | None = None,
    ) -> None:
        self._where = f"the coordinator at {host}:{port}"
        self._address = host, port
        self._secret = secret
        self._certificate = certificate
        self._policy = policy or RpcPolicy()
        self._clock = clock or SystemClock()
        self.process_id = os.getpid()
        self.is_broken = False
        self._channel = self._connect(f"{caller}: " if caller else "")

    def _connect(self, who: str) -> Channel:
        deadline_s = self._clock.monotonic_s() + self._policy.handshake_timeout_s
        try:
            connection = socket.create_connection(self._address, timeout=self._policy.handshake_timeout_s)
        except OSError as error:
            raise self._unreachable(who, error) from error
        channel = Channel(connection, self._policy, self._clock)
        try:
            if self._certificate:
                self._begin_tls(channel, self._certificate, deadline_s, who)
            is_known = prove(channel, self._secret, deadline_s)
        except (EOFError, OSError) as error:
            channel.close()
            raise self._unreachable(who, error, is_connected=True) from error
        if not is_known:
            channel.close()
            raise ProtocolError(
                f"{who}{self._where} does not know this query's secret, or runs another version of statelog.",
                hint="Make sure that driver and executors run the same version, then restart the query.",
            )
        channel.silence_s = self._policy.silence_s
        return channel

    def _connect_again(self, who: str, deadline_s: float) -> Channel:
        """A new connection in place of a silent one; the driver may be out of reach for some time."""
        pause = threading.Event()
        while True:
            try:
                return self._connect(who)
            except ProtocolError as error:
                cause = error.__cause__
                # A certificate of another driver is an OSError and a ValueError.
                is_out_of_reach = isinstance(cause, OSError) and not isinstance(
                    cause, ConnectionRefusedError | ValueError
                )
                is_over = self._clock.monotonic_s() + self._policy.reconnect_s >= deadline_s
                if not is_out_of_reach or is_over:
                    raise
                pause.wait(self._policy.reconnect_s)

    def _begin_tls(self, channel: Channel, certificate: bytes, deadline_s: float, who: str) -> None:
        import ssl

        from statelog.rpc.tls import connect

        try:
            channel.begin_tls(connect(certificate), deadline_s)
        except ssl.SSLError as error:
            channel.close()
            is_other = isinstance(error, ssl.SSLCertVerificationError)
            does = "lacks the certificate of this query's driver" if is_other else "does not answer with TLS"
            raise ProtocolError(
                f"{who}{self._where} {does}: {error}.",
                hint="Another service or application now has that address, or the connection is intercepted."
                " Find out what uses the address, and restart the query.",
            ) from error

    def call(self, request: Request, payload: bytes = b"") -> Reply:
        """Send a request with its payload, and wait for the reply.

        Raises the StatelogError that the call caused on the driver. Raises ProtocolError if the connection breaks or
        the reply does not come in time; the call may have taken effect nevertheless.
        """
        policy = self._policy
        who = request.name if isinstance(request, Tick | Ping) else request.task.name
        encoded = _encoder.encode(request)
        if len(encoded) > policy.max_request_bytes or len(payload) > policy.max_payload_bytes:
            raise ProtocolError(
                f"{who}: a call of {len(encoded)} bytes with {len(payload)} more is too large for {self._where}, which"
                f" accepts up to {policy.max_request_bytes} and {policy.max_payload_bytes}.",
                hint="Set a smaller Options(inline_budget_bytes=...): then changes are written to the store instead.",
            )
        deadline_s = self._clock.monotonic_s() + policy.call_timeout_s
        # If this call ends early, its reply may still come; it must not be read as the reply to the next call.
        self.is_broken = True
        try:
            reply = self._exchange(who, [_CALL.pack(len(encoded), len(payload)), encoded, payload], deadline_s)
        except (EOFError, OSError, *MALFORMED) as error:
            self._channel.close()
            if isinstance(error, TimeoutError) and error.errno is None:
                raise self._late(who) from error
            raise self._unreachable(f"{who}: ", error) from error
        self.is_broken = False
        if isinstance(reply, Failure):
            raise error_from_parts(reply.error, reply.message, reply.kind, reply.hint)
        return reply

    def _exchange(self, who: str, parts: list[bytes], deadline_s: float) -> Reply:
        """Send a call and receive the reply, on one connection after another if they are silent."""
        while True:
            try:
                self._channel.send(parts, deadline_s)
                reply: Reply = _replies.decode(self._receive_reply(deadline_s))
                return reply
            except SilentError as error:
                _log.warning("%s: %s is silent (%s); the call is repeated", who, self._where, error)
                self._channel.close()
                # The call may be large and the network slow: then the next attempt must not end as early.
                silence_s = 2 * (self._channel.silence_s or 0)
                self._channel = self._connect_again(f"{who}: ", deadline_s)
                self._channel.silence_s = silence_s

    def _receive_reply(self, deadline_s: float) -> bytes:
        size = _BEAT
        while size == _BEAT:
            (size,) = _REPLY.unpack(self._channel.receive(_REPLY.size, deadline_s))
        if size > self._policy.max_reply_bytes:
            raise OSError(f"a reply of {size} bytes is larger than {self._policy.max_reply_bytes}")
        return self._channel.receive(size, deadline_s)

    def _late(self, who: str) -> ProtocolError:
        return ProtocolError(
            f"{who}: {self._where} has not answered within {self._policy.call_timeout_s:g} s.",
            hint="See the driver's log and a thread dump for the reason, such as slow storage or a long pause."
            " A larger Options(driver_timeout_s=...) allows more time.",
        )

    def _unreachable(self, who: str, error: Exception, *, is_connected: bool = False) -> ProtocolError:
        hint = (
            "If the driver runs, set spark.statelog.coordinator.host and .port to an address that executors can reach."
        )
        if is_connected and isinstance(error, TimeoutError):
            hint = (
                "It accepts connections, but does not answer as this query's driver does. Check whether another service"
                f" now has the port, or an application that encrypts its calls. {hint}"
            )
        return ProtocolError(f"{who}{self._where} cannot be reached: {type(error).__name__}: {error}.", hint=hint)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
