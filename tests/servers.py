"""What the test servers have in common: processes on loopback that end with the tests, and data that goes with them."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self


class LocalServer(ABC):
    """A server for tests, as a context manager; a subclass starts its processes with :meth:`_spawn`.

    They are children of this process and end with it, even if it is killed. `directory` holds the server's data until
    it stops. It is not among pytest's temporary directories, whose names can be too long for a socket in them.
    """

    def __init__(self, name: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self._processes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill its processes and remove its directory."""
        while self._processes:
            process = self._processes.pop()
            process.kill()
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def is_running(self) -> bool:
        """Whether none of its processes has ended."""
        return all(process.poll() is None for process in self._processes)

    @abstractmethod
    def _start(self) -> None:
        """Start its processes, and return once clients can connect."""

    def _spawn(self, *command: str, **how: Any) -> subprocess.Popen[Any]:
        """Start a process without input; `how` is for Popen."""
        process = subprocess.Popen(("setpriv", "--pdeathsig", "KILL", *command), stdin=subprocess.DEVNULL, **how)
        self._processes.append(process)
        return process


def free_ports(number: int) -> list[int]:
    """Ports of loopback that no one listens on at the moment."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]
    finally:
        for free in sockets:
            free.close()
