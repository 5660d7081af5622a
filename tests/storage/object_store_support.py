"""What the tests of :mod:`tests.storage.test_object_store` and others share."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def name(self) -> str:
        return unquote(self.path.partition("?")[0])


class Service:
    """Speaks HTTP; `answer` gets every request and what can answer it."""

    def __init__(self) -> None:
        self.answer: Callable[[Request, Handler], None] = lambda request, handler: handler.reply(200)
        self.requests: list[Request] = []
        self.connections = 0
        self.released = threading.Event()
        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.service = self
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def say(self, status: int, code: str = "", message: str = "") -> None:
        """Answer everything with a status and an error document."""
        body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>' if code else ""
        self.answer = lambda request, handler: handler.reply(status, body.encode())

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    service: Service


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        assert isinstance(self.server, Server)
        self.service = self.server.service
        self.service.connections += 1

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline()
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, body)
        self.service.requests.append(request)
        self.service.answer(request, self)

    def reply(self, status: int, body: bytes = b"", *, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        headers = {"ETag": '"1"', "Last-Modified": "Sat, 21 Nov 2026 10:00:00 GMT", **headers}
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def hang_up(self) -> None:
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.wfile.close()
        self.connection.close()
        self.close_connection = True

    def finish(self) -> None:
        if not self.wfile.closed:
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
