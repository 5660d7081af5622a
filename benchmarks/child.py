"""Calls in processes of their own: a fresh interpreter, and with it a fresh JVM, for each."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import click

_ROOT: Final = Path(__file__).resolve().parents[1]
_SHOWN_LINES: Final = 40
_POLL_S: Final = 0.05
_RESULT: Final = "result.pickle"
_LOG: Final = "output.log"
_T = TypeVar("_T")


def run_in_child(
    call: partial[_T],
    directory: Path,
    environment: Mapping[str, str] | None = None,
    watch: Callable[[int], None] | None = None,
) -> _T:
    """Make a call in a fresh process, whose output goes to a file in `directory`.

    `watch` is called again and again with the child's process id, which is also that of its session. A failure is a
    click.ClickException with the end of the child's output.
    """
    with _child(call, directory, environment or {}) as child:
        while watch is not None and child.poll() is None:
            watch(child.pid)
            time.sleep(_POLL_S)
        code = child.wait()
    if code != 0:
        raise _failed(call, code, directory)
    result: _T = pickle.loads((directory / _RESULT).read_bytes())
    return result


def kill_child_when(
    is_over: Callable[[], bool],
    call: partial[Any],
    directory: Path,
    environment: Mapping[str, str],
    timeout_s: float,
) -> None:
    """Make a call in a fresh process, and kill that with all its descendants once `is_over`; Linux only.

    A child that ends before, or takes too long, is a click.ClickException.
    """
    end_s = time.monotonic() + timeout_s
    with _child(call, directory, environment) as child:
        while not is_over():
            if child.poll() is not None:
                raise _failed(call, child.returncode, directory)
            if time.monotonic() > end_s:
                raise click.ClickException(f"{_name(call)} was not to be killed after {timeout_s:.0f} s")
            time.sleep(_POLL_S)
        kill_session(child)


@contextmanager
def _child(call: partial[Any], directory: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    call_file = directory / "call.pickle"
    call_file.write_bytes(pickle.dumps(call))
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        **environment,
    }
    command = [sys.executable, "-m", "benchmarks.child", str(call_file), str(directory / _RESULT)]
    with (directory / _LOG).open("wb") as output:
        child = subprocess.Popen(
            command, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield child
        except BaseException:
            # The child's JVM and workers are in its process group.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise


def _failed(call: partial[Any], code: int, directory: Path) -> click.ClickException:
    return failure(_name(call), code, directory / _LOG)


def failure(name: str, code: int, log: Path) -> click.ClickException:
    """The failure of a child, with the end of its output."""
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
    return click.ClickException(f"{name} failed with exit code {code}; the end of its output:\n{tail}")


def _name(call: partial[Any]) -> str:
    return f"{call.func.__module__}:{call.func.__qualname__}"


def kill_session(child: subprocess.Popen[bytes]) -> None:
    """Kill a child that has a session of its own, with all its descendants; Linux only."""
    # Spark's Python workers have a process group of their own, but all are in the child's session.
    while members := processes_of(child.pid):
        for process in members:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        child.poll()
        time.sleep(_POLL_S)


def processes_of(session: int) -> list[int]:
    """The processes of a session that still run."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, _, of, *_ = path.read_text().rpartition(")")[2].split()
            if int(of) == session and state != "Z":
                processes.append(int(path.parent.name))
    return processes


if __name__ == "__main__":
    _, call_file, result_file = sys.argv
    Path(result_file).write_bytes(pickle.dumps(pickle.loads(Path(call_file).read_bytes())()))
