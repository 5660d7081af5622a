"""A PostgreSQL server of Debian's packages: on a free port of loopback, for the life of this process at most."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final, Self

import psycopg

__all__ = ["PostgresServer", "missing_programs"]

_START_S: Final = 60.0
_POLL_S: Final = 0.05
_USER: Final = "postgres"
"""PostgreSQL does not run as root; Debian's package makes this user."""


def missing_programs() -> list[str]:
    """What must be installed before a server can be started."""
    return [name for name in ("initdb", "postgres", "setpriv") if _find(name) is None]


def _find(name: str) -> str | None:
    """A program of the search path or of the newest PostgreSQL where Debian has it."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
    return shutil.which(name, path=os.pathsep.join([*map(str, reversed(versions)), os.environ.get("PATH", "")]))


class PostgresServer:
    """A server whose data is gone when it stops. It ends with this process, also if that is killed."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="postgres-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._log = self._directory / "server.log"
        self._databases = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def create_database(self) -> str:
        """Make an empty database, and return its conninfo."""
        self._databases += 1
        name = f"bank_{self._databases}"
        with psycopg.connect(self._conninfo("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self._conninfo(name)

    def stop(self) -> None:
        """End the server and remove its directory."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # at once, with all its processes
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _conninfo(self, database: str) -> str:
        return f"host=127.0.0.1 port={self._port} user={_USER} dbname={database}"

    def _start(self) -> None:
        data = self._directory / "data"
        if os.geteuid() == 0:
            shutil.chown(self._directory, _USER, _USER)
        with self._log.open("wb") as log:
            # Only this machine can connect, so there is no password. The data need not survive the machine.
            command = ["initdb", "--pgdata", str(data), "--username", _USER, "--auth", "trust", "--no-sync"]
            subprocess.run(_unprivileged(*command), cwd="/", stdout=log, stderr=log, check=True)
            settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
            options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
            command = ["postgres", "-D", str(data), "-p", str(self._port), *options]
            self._process = subprocess.Popen(_unprivileged(*command), cwd="/", stdout=log, stderr=log)
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                psycopg.connect(self._conninfo("postgres")).close()
            except psycopg.OperationalError:
                time.sleep(_POLL_S)
            else:
                return
        raise RuntimeError(f"PostgreSQL did not start.\n{self._log.read_text(errors='replace')[-2000:]}")


def _unprivileged(name: str, *arguments: str) -> list[str]:
    """The command as another user than root; the program ends with this process."""
    user = ["--reuid", _USER, "--regid", _USER, "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", "--pdeathsig", "QUIT", *user, str(_find(name)), *arguments]
