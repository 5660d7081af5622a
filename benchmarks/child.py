"""Sides in processes of their own: a fresh interpreter, and with it a fresh JVM, for each."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import click

__all__ = ["run_in_child"]

_ROOT: Final = Path(__file__).resolve().parents[1]
_SHOWN_LINES: Final = 40


def run_in_child(function: str, arguments: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Call a function in a fresh process.

    Parameters
    ----------
    function : str
        ``module:name`` of a function that takes keyword arguments and returns what JSON can hold.
    arguments : dict
        Its arguments; what JSON can hold.
    directory : Path
        An existing directory for the arguments, the result and the child's output.

    Raises
    ------
    click.ClickException
        If the child fails; shows the end of its output.
    """
    asked, answered, log = (directory / name for name in ("arguments.json", "result.json", "output.log"))
    asked.write_text(json.dumps(arguments))
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    command = [sys.executable, "-m", "benchmarks.child", function, str(asked), str(answered)]
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait()
        except BaseException:
            # The child's JVM and workers are in its process group.
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
        raise click.ClickException(f"{function} failed with exit code {code}; the end of its output:\n{tail}")
    result: dict[str, Any] = json.loads(answered.read_text())
    return result


def _main(function: str, asked: str, answered: str) -> None:
    module, _, name = function.partition(":")
    call = getattr(importlib.import_module(module), name)
    result = call(**json.loads(Path(asked).read_text()))
    Path(answered).write_text(json.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
