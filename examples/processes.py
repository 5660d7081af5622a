"""Programs that are started in a session of their own, so that nothing of them is left when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

__all__ = ["JobFailedError", "kill_session", "members", "open_session"]

_REPOSITORY: Final = Path(__file__).parents[1]
_POLL_S: Final = 0.05
_END_LIMIT_S: Final = 20.0
# The job starts often and runs briefly, on few cores: compiling less and collecting serially halves its CPU time.
_JVM_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class JobFailedError(Exception):
    """The job ended or fell silent, and not because it was killed."""


@contextmanager
def open_session(command: Sequence[str], work: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module in a session of its own, of which nothing is left afterwards.

    Descendants whose parent was killed still belong to the session; and a Ctrl-C on the terminal does not
    reach it.

    Parameters
    ----------
    command : sequence of str
        The module and its arguments.
    work, log : Path
        Its working directory, and the file that gets its console output.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=work,
            env=_environment(work),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    limit_s = 0.0
    try:
        yield process
        # Spark's processes end by themselves when one of them is gone, as they would under any supervisor.
        limit_s = _END_LIMIT_S
    finally:
        deadline_s = time.monotonic() + limit_s
        while process.poll() is None or members(process.pid):
            if time.monotonic() >= deadline_s:
                kill_session(process.pid)
            time.sleep(_POLL_S)


def members(session: int) -> list[int]:
    """The living processes of a session; its id is that of its first process."""
    return [pid for pid in psutil.pids() if _is_member(pid, session)]


def kill_session(session: int) -> None:
    """Kill the processes of a session, all at once."""
    for member in members(session):
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def _environment(work: Path) -> dict[str, str]:
    """The job's environment: it finds this package, and its scratch files are below the working directory."""
    paths = [str(_REPOSITORY), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    scratch = work / "scratch"
    scratch.mkdir(exist_ok=True)
    return {
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths),
        "SPARK_LOCAL_DIRS": str(scratch),
        "SPARK_SUBMIT_OPTS": f"{_JVM_OPTIONS} -Djava.io.tmpdir={scratch}",
        "TMPDIR": str(scratch),
    }


def _is_member(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False
