"""The interpreter of the Python workers, asked by the driver."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from statelog import ConfigurationError, ErrorKind
from statelog.spark.driver.interpreter import check_interpreter, check_source_interpreter

VERSION = list(sys.version_info[:2])


def session(python: object, master: str = "local[2]", environment: dict[str, str] | None = None) -> Any:
    context = SimpleNamespace(
        master=master, pythonExec=str(python), _python_includes=[], environment=dict(environment or {})
    )
    return SimpleNamespace(sparkContext=context)


def interpreter(folder: Path, script: str) -> Path:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\necho >> {folder}/asked\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


def test_an_interpreter_without_packages_is_refused(tmp_path: Path) -> None:
    python = interpreter(tmp_path, f'exec {sys.executable} -S "$@"')
    with pytest.raises(
        ConfigurationError, match=f"would run {python}, which cannot import .*pyarrow.*PYSPARK_PYTHON"
    ) as no:
        check_interpreter(session(python))
    assert no.value.kind is ErrorKind.WORKER_IMPORT
    assert sys.executable in no.value.hint
    packages = os.pathsep.join(path for path in sys.path if path)
    check_interpreter(session(python, environment={"PYTHONPATH": packages}))


@pytest.mark.parametrize("major", [2, 3, 4])
def test_an_interpreter_of_another_version_is_refused(tmp_path: Path, major: int) -> None:
    python = interpreter(tmp_path, f"echo '[[{major}, 99], []]'")
    with pytest.raises(ConfigurationError, match=rf"Python {major}\.99, but the driver runs Python {VERSION[0]}\."):
        check_interpreter(session(python))


def test_an_interpreter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere/python, which cannot be run"):
        check_interpreter(session(tmp_path / "nowhere" / "python"))


def test_the_process_of_a_clock_needs_the_interpreter_on_the_driver(tmp_path: Path) -> None:
    """With a cluster's master, too: an archive of the executors is not unpacked there in client mode."""
    with pytest.raises(ConfigurationError, match=r"on the driver with \./environment/bin/python") as refused:
        check_source_interpreter(session("./environment/bin/python", master="yarn"))
    assert refused.value.kind is ErrorKind.WORKER_IMPORT
    check_source_interpreter(session(sys.executable, master="yarn"))


def test_a_fit_interpreter_is_asked_once(tmp_path: Path) -> None:
    python = interpreter(tmp_path, f"echo from a start-up script; echo '[{VERSION}, []]'")
    for _ in range(3):
        check_interpreter(session(python))
    assert (tmp_path / "asked").read_text() == "\n"


@pytest.mark.parametrize("script", ["exit 3", "echo hello", "true"])
def test_an_interpreter_that_does_not_answer_is_left_to_the_first_task(tmp_path: Path, script: str) -> None:
    check_interpreter(session(interpreter(tmp_path, script)))


@pytest.mark.parametrize("master", ["yarn", "spark://host:7077", "k8s://host"])
def test_the_interpreter_of_a_cluster_is_not_asked(tmp_path: Path, master: str) -> None:
    check_interpreter(session(interpreter(tmp_path, "echo '[[2, 7], []]'"), master))
    assert not (tmp_path / "asked").exists()


def test_the_driver_s_own_interpreter_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = interpreter(tmp_path, "echo '[[2, 7], []]'")
    monkeypatch.setattr(sys, "executable", str(python))
    (tmp_path / "python3").symlink_to(python)
    check_interpreter(session(python))
    check_interpreter(session(tmp_path / "python3"))
    monkeypatch.setenv("PATH", str(tmp_path))
    check_interpreter(session("python3"))
    assert not (tmp_path / "asked").exists()
