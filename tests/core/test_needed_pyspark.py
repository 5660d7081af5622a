"""What a user is told whose PySpark is missing or too old, or whose session is remote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame

import statelog
from statelog import ConfigurationError
from statelog.errors import ErrorKind
from statelog.needed_pyspark import pyspark_problem

COMMANDS = [["-c", "import statelog; statelog.key_by"], ["-m", "statelog", "doctor", "/tmp/nothing"]]


def run(path: Path, command: list[str]) -> str:
    """What a new Python says that finds the packages of `path` first."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *sys.path])}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS, ids=["python", "command line"])
def test_an_old_pyspark_is_named_and_not_replaced(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text('__version__ = "3.5.3"')
    said = run(tmp_path, command)
    assert f"needs PySpark 4.0 or later, but this Python has PySpark 3.5.3 ({tmp_path}" in said
    assert "not installed" not in said


@pytest.mark.parametrize("command", COMMANDS, ids=["python", "command line"])
def test_a_missing_pyspark_is_named(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError('No module named pyspark', name='pyspark')")
    assert "needs PySpark, which is not installed: pip install 'statelog[spark]'" in run(tmp_path, command)


def test_an_error_of_another_module_is_left_as_it_is() -> None:
    assert pyspark_problem(ImportError("no", name="pandas")) is None
    assert pyspark_problem(ImportError("no", name="pyspark.of_the_future")) is None


class Remote(DataFrame):
    """A DataFrame of Spark Connect, as far as it may be touched."""

    @property
    def sparkSession(self) -> Any:
        return SimpleNamespace()


class Pass(statelog.OperatorProcessor):
    """Returns its rows."""

    def init(self, handle: Any) -> None:
        pass

    def process(self, rows: Any, *_: Any) -> Any:
        return rows


def test_spark_connect_is_refused_before_anything_else() -> None:
    remote = object.__new__(Remote)
    for call in (lambda: statelog.key_by(remote, "user"), lambda: statelog.process(remote, Pass(), "user string")):
        with pytest.raises(ConfigurationError, match="does not run on Spark Connect") as refused:
            call()
        assert refused.value.kind is ErrorKind.UNSUPPORTED_FEATURE
