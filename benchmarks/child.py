"""Sides in processes of their own: a fresh interpreter, and with it a fresh JVM, for each."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import click

_ROOT: Final = Path(__file__).resolve().parents[1]
_SHOWN_LINES: Final = 40
_POLL_S: Final = 0.05
_RESULT: Final = "result.json"
_LOG: Final = "output.log"


def run_in_child(
    function: str,
    arguments: dict[str, Any],
    directory: Path,
    environment: Mapping[str, str] | None = None,
    watch: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Call ``module:name`` in a fresh process; arguments and result are what JSON can hold.

    `directory` gets the child's output. `watch` is called again and again with the child's process id, which is also
    that of its session. A failure is a click.ClickException with the end of the child's output.
    """
    with _child(function, arguments, directory, environment or {}) as child:
        while watch is not None and child.poll() is None:
            watch(child.pid)
            time.sleep(_POLL_S)
        code = child.wait()
    if code != 0:
        raise _failed(function, code, directory)
    result: dict[str, Any] = json.loads((directory / _RESULT).read_text())
    return result


def kill_child_when(
    is_over: Callable[[], bool],
    function: str,
    arguments: dict[str, Any],
    directory: Path,
    environment: Mapping[str, str],
    timeout_s: float,
) -> None:
    """Call a function in a fresh process, and kill that with all its descendants once `is_over`; Linux only.

    A child that ends before, or takes too long, is a click.ClickException.
    """
    end_s = time.monotonic() + timeout_s
    with _child(function, arguments, directory, environment) as child:
        while not is_over():
            if child.poll() is not None:
                raise _failed(function, child.returncode, directory)
            if time.monotonic() > end_s:
                raise click.ClickException(f"{function} was not to be killed after {timeout_s:.0f} s")
            time.sleep(_POLL_S)
        # Spark's Python workers have a process group of their own, but all are in the child's session.
        while members := processes_of(child.pid):
            for process in members:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            child.poll()
            time.sleep(_POLL_S)


@contextmanager
def _child(
    function: str, arguments: dict[str, Any], directory: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    arguments_file = directory / "arguments.json"
    arguments_file.write_text(json.dumps(arguments))
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        **environment,
    }
    command = [sys.executable, "-m", "benchmarks.child", function, str(arguments_file), str(directory / _RESULT)]
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


def _failed(function: str, code: int, directory: Path) -> click.ClickException:
    tail = "\n".join((directory / _LOG).read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
    return click.ClickException(f"{function} failed with exit code {code}; the end of its output:\n{tail}")


def processes_of(session: int) -> list[int]:
    """The processes of a session that still run."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, _, of, *_ = path.read_text().rpartition(")")[2].split()
            if int(of) == session and state != "Z":
                processes.append(int(path.parent.name))
    return processes


def _main(function: str, arguments_file: str, result_file: str) -> None:
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    Path(result_file).write_text(json.dumps(call(**json.loads(Path(arguments_file).read_text()))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
