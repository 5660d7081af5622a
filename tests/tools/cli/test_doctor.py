"""The command ``doctor``: its output, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from statelog import Finding
from statelog.__main__ import main
from statelog.tools.doctor import doctor as diagnosis
from tests.spark.faults import wait_until

FINDINGS = [
    Finding("error", "driver-port", "executor 2", "host-b", "driver:4040 cannot be reached.", "Open the port."),
    Finding("ok", "clock", "executor 1", "host-a", "The clock is right."),
    Finding("ok", "clock", "executor 2", "host-b", "The clock is right."),
    Finding("warning", "encryption", "driver", "host-c", "It is in clear.", "Encrypt the network."),
]


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of the function; its findings are those above, or under ``found``."""
    calls: dict[str, Any] = {"found": FINDINGS}

    def doctor(location: str, **arguments: Any) -> list[Finding]:
        calls.update(arguments, location=location)
        return list(calls["found"])

    monkeypatch.setattr(diagnosis, "doctor_in_own_session", doctor)
    return calls


def test_an_error_is_exit_code_1_and_comes_last(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "s3://bucket/x"]) == 1
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[-1] == "1 error, 1 warning, 2 ok"
    assert lines[-2].strip() == "-> Open the port."
    assert lines[-3].split()[:3] == ["error", "driver-port", "executor"]
    [clocks] = [line for line in lines if "clock is right" in line]
    assert "executor 1 (host-a), executor 2 (host-b)" in clocks
    assert asked["location"] == "s3://bucket/x"
    assert (asked["master"], asked["conf"], asked["timeout_s"]) == (None, {}, 60)


def test_warnings_are_no_failure(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    asked["found"] = FINDINGS[1:]
    assert main(["doctor", "x"]) == 0
    assert "0 errors, 1 warning, 2 ok" in capsys.readouterr().out


def test_json_has_the_fields_of_the_findings(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "x", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [asdict(one) for one in FINDINGS]


def test_settings_of_the_session(asked: dict[str, Any]) -> None:
    main(["doctor", "x", "--master", "yarn", "--conf", "a.b=c=d", "--conf", "e=", "--timeout-s", "5"])
    assert (asked["master"], asked["conf"], asked["timeout_s"]) == ("yarn", {"a.b": "c=d", "e": ""}, 5)


def test_brokers_and_options_of_kafka(asked: dict[str, Any]) -> None:
    main(["doctor", "x", "--kafka", "broker:9092", "--kafka-option", "subscribe=clicks"])
    assert asked["kafka"] == {"kafka.bootstrap.servers": "broker:9092", "subscribe": "clicks"}
    main(["doctor", "x"])
    assert asked["kafka"] is None


@pytest.mark.parametrize("wrong", [["--conf", "a.b"], ["--conf", "=x"], ["--timeout-s", "0"], []])
def test_wrong_arguments_are_exit_code_2(asked: dict[str, Any], wrong: list[str]) -> None:
    assert main(["doctor", *(["x"] if wrong else []), *wrong]) == 2
    assert "location" not in asked


@pytest.mark.spark
def test_without_a_session_the_driver_is_checked_and_nothing_remains(tmp_path: Path) -> None:
    """Spark does not start with this setting."""
    command = [sys.executable, "-m", "statelog", "doctor", str(tmp_path / "state"), "--json"]
    done = subprocess.run([*command, "--conf", "spark.driver.memory=abc"], capture_output=True, text=True, timeout=120)
    found = [Finding(**one) for one in json.loads(done.stdout)]
    assert done.returncode == 1
    assert [one.check for one in found if one.level == "error"] == ["session"]
    assert "There is no Spark session" in found[0].found
    assert ("ok", "location") in {(one.level, one.check) for one in found}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spark
def test_a_command_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    """No master answers, so it waits; SIGTERM ends it, and the JVM with it."""
    command = [sys.executable, "-m", "statelog", "doctor", str(tmp_path / "state"), "--master", "spark://127.0.0.1:9"]
    mark = f"DOCTOR={tmp_path}"
    environment = {**os.environ, "DOCTOR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        begun = next(line for line in process.stderr if "connect" in line.lower())
        assert len(processes_with(mark)) >= 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130, begun
    wait_until(lambda: not processes_with(mark), "the end of the JVM", 30)
    assert list(tmp_path.iterdir()) == []


def processes_with(mark: str) -> list[str]:
    """The processes whose environment has an entry."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(process.name)
    return found
