"""Checks that the interpreter of the Python workers can run tasks, as far as the driver can tell.

With a local master the workers use an interpreter of this machine, and it is asked once. The executors of a cluster use
interpreters on other machines; there the first task finds out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from typing import Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from statelog.errors import ConfigurationError, ErrorKind
from statelog.log_fields import get_logger
from statelog.spark.driver import internals

_log = get_logger(__name__)

_NEEDED: Final = ("statelog", "lazy_loader", "msgspec", "numpy", "pandas", "pyarrow", "xxhash")
_TIMEOUT_S: Final = 30
_QUESTION: Final = """
import importlib.util, json, sys
needed, paths = json.loads(sys.argv[1])
sys.path[:0] = paths
missing = [name for name in needed if importlib.util.find_spec(name) is None]
print(json.dumps([list(sys.version_info[:2]), missing]))
"""
_HINT: Final = (
    "Set PYSPARK_PYTHON (or spark.pyspark.python) to the interpreter of the environment that has statelog, here"
    f" {sys.executable}, before the session is created."
)


def is_on_this_machine(context: SparkContext) -> bool:
    """Whether all executors run on the driver's machine."""
    return str(context.master).split("[")[0] in ("local", "local-cluster")


def check_interpreter(session: SparkSession) -> None:
    """Refuse a workers' interpreter that is missing, is of another Python version, or lacks a package."""
    context = session.sparkContext
    python = internals.worker_python(context)
    if is_on_this_machine(context) and not _is_own(python):
        paths = tuple(internals.shipped_files(context))
        environment = {**os.environ, **context.environment}
        inherited = [own.get("PYTHONPATH", "") for own in (context.environment, os.environ)]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, inherited))
        _check(python, paths, tuple(sorted(environment.items())))


def check_source_interpreter(session: SparkSession) -> None:
    """Refuse an interpreter that the driver's machine lacks: with any master, Spark runs a source's process there."""
    python = internals.worker_python(session.sparkContext)
    if shutil.which(python) is None:
        raise ConfigurationError(
            f"The query needs a clock, whose process Spark runs on the driver with {python}; it does not exist there.",
            kind=ErrorKind.WORKER_IMPORT,
            hint="Unpack the executors' archive on the driver's machine too, so that the path exists there, or submit"
            " the application in cluster mode.",
        )


def _is_own(python: str) -> bool:
    """Whether an interpreter is the driver's own, in the same virtual environment."""
    found = shutil.which(python) or python
    here = os.path.dirname(found) == os.path.dirname(sys.executable)
    return found == sys.executable or (here and os.path.realpath(found) == os.path.realpath(sys.executable))


@cache
def _check(python: str, paths: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> None:
    """Ask an interpreter for its version and missing packages. Without a clear answer, the first task finds out."""
    command = [python, "-c", _QUESTION, json.dumps([_NEEDED, paths])]
    try:
        asked = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        version, missing = json.loads(asked.stdout.splitlines()[-1])
    except (FileNotFoundError, PermissionError) as error:
        raise _unfit(f"{python}, which cannot be run ({error.strerror})") from error
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        _log.debug("the interpreter %s of the Python workers did not answer: %s", python, error)
        return
    own = list(sys.version_info[:2])
    if version != own:
        raise _unfit(f"{python}, which is Python {_text(version)}, but the driver runs Python {_text(own)}")
    if missing:
        raise _unfit(f"{python}, which cannot import {', '.join(missing)}")


def _text(version: list[int]) -> str:
    return ".".join(map(str, version))


def _unfit(what: str) -> ConfigurationError:
    return ConfigurationError(f"The Python workers would run {what}.", kind=ErrorKind.WORKER_IMPORT, hint=_HINT)
