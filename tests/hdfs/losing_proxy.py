"""A way to a NameNode on which an answer can get lost."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self


class LosingProxy:
    """Passes on what clients and a server say to each other, until an answer is to get lost; a context manager.

    Then the request reaches the server, and the connection breaks before its answer does.
    """

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lost: bytes | None = None
        self.losses = 0
        """How many answers were lost."""

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def lose_answer_to(self, operation: str) -> None:
        """Lose the answer to the next request for an operation of WebHDFS."""
        self._lost = f"op={operation}&".encode()

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                is_lost = threading.Event()
                for way in ((client, server, is_lost, True), (server, client, is_lost, False)):
                    threading.Thread(target=self._pass_on, args=way, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_lost: threading.Event, asks: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if asks and self._lost is not None and self._lost in data:
                    self._lost = None
                    is_lost.set()
                if not asks and is_lost.is_set():
                    self.losses += 1
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
