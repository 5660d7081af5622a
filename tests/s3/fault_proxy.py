"""A reverse proxy between a client and an HTTP server that refuses requests and loses their answers.

It passes on headers as they came, the Host header included, which is part of what a client of S3 signs.
"""

from __future__ import annotations

import random
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Literal

_HOST: Final = "127.0.0.1"
_IDLE_S: Final = 5.0
_SLOW_DOWN: Final = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


@dataclass(frozen=True)
class Rule:
    """What happens to some requests.

    They are those of a method (empty: all) whose target has the regular expression `path`: to a random `share` of them,
    and `times` at most. ``slow_down`` answers with 503, ``reset`` resets the connection, ``reset_after`` does so when
    the server has answered, and ``hang`` never answers.
    """

    action: Literal["slow_down", "reset", "reset_after", "hang"]
    method: str = ""
    path: str = ""
    share: float = 1.0
    times: int | None = None


class FaultProxy(ThreadingHTTPServer):
    """The proxy; its rules may be replaced and its counts read at any time.

    Of the rules that fit a request the first one counts, and no rule means that it is passed on at once.
    """

    request_queue_size = 1024

    def __init__(self, upstream_port: int, rules: Sequence[Rule] = (), *, seed: int = 0) -> None:
        super().__init__((_HOST, 0), _Handler)
        self.upstream_port = upstream_port
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.rules = rules
        self.counts: Counter[str] = Counter()
        """Requests by method and by action; ``passed`` are those without a fault."""

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.server_port

    @property
    def rules(self) -> Sequence[Rule]:
        """The rules; replaced as a whole, and counted from the start then."""
        return self._rules

    @rules.setter
    def rules(self, rules: Sequence[Rule]) -> None:
        with self._lock:
            self._rules = tuple(rules)
            self._applied: Counter[int] = Counter()

    def meet(self, method: str, target: str) -> str:
        """Count a request and return what happens to it."""
        with self._lock:
            rule = self._rule(method, target)
            action = "passed" if rule is None else rule.action
            self.counts.update((action, method))
        return action

    def _rule(self, method: str, target: str) -> Rule | None:
        for number, rule in enumerate(self._rules):
            if rule.method not in ("", method) or not re.search(rule.path, target):
                continue
            if rule.times is not None and self._applied[number] >= rule.times:
                continue
            if rule.share < 1 and self._random.random() >= rule.share:
                continue
            self._applied[number] += 1
            return rule
        return None

    def shutdown_request(self, request: Any) -> None:
        request.close()  # without a shutdown before, which would be an end and not a reset

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | HTTPException):  # else a side went away
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """A connection of the client, with one to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FaultProxy

    def setup(self) -> None:
        super().setup()
        self._upstream = HTTPConnection(_HOST, self.server.upstream_port)
        self._used_s = 0.0

    def finish(self) -> None:
        super().finish()
        self._upstream.close()

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        action = self.server.meet(self.command, self.path)
        if action == "hang":
            self.rfile.read()  # ends when the client gives up
        elif action == "slow_down":
            self._answer(503, "Slow Down", [("Content-Type", "application/xml")], _SLOW_DOWN)
        elif action != "reset":
            self._pass_on(body, is_lost=action == "reset_after")
        if action in ("reset", "reset_after"):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection |= action in ("hang", "reset", "reset_after")

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do_any

    def _pass_on(self, body: bytes, *, is_lost: bool) -> None:
        if time.perf_counter() - self._used_s > _IDLE_S:
            self._upstream.close()  # the server may be closing it now, and nothing is sent twice
        self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() != "expect":  # answered here
                self._upstream.putheader(name, value)
        self._upstream.endheaders(body or None)
        answer = self._upstream.getresponse()
        content = answer.read()
        self._used_s = time.perf_counter()
        if not is_lost:
            self._answer(answer.status, answer.reason, answer.getheaders(), content)

    def _answer(self, status: int, reason: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status, reason)
        has_length = status in (204, 304)
        for name, value in headers:
            has_length |= name.lower() == "content-length"
            if name.lower() != "transfer-encoding":
                self.send_header(name, value)
        if not has_length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def proxy_in_thread(proxy: FaultProxy) -> Iterator[FaultProxy]:
    """Run a proxy in threads of this process."""
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
    with proxy:
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
