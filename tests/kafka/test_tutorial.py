"""docs/tutorial-kafka.md: its blocks run in order, as a program of a reader with a broker."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.page import REPOSITORY
from tests.jars import KAFKA, spark_jars
from tests.kafka.broker import KafkaBroker

pytest_plugins = ("tests.kafka.plugin",)

PAGE = (REPOSITORY / "docs" / "tutorial-kafka.md").read_text()
CONNECTOR = re.compile(r'"spark\.jars\.packages": ".+"')


def test_the_tutorial_runs(broker: KafkaBroker, tmp_path: Path) -> None:
    pytest.importorskip("confluent_kafka", reason="no client of Kafka; ./dev kafka installs it")
    program = "".join(re.findall(r"^```python with-kafka\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    [(setting, jars)] = spark_jars(KAFKA).items()
    program, connectors = CONNECTOR.subn(f'"{setting}": "{jars}"', program)
    assert (connectors, program.count('"localhost:9092"')) == (1, 1)
    (tmp_path / "tutorial.py").write_text(program.replace("localhost:9092", broker.address))
    shutil.copy(REPOSITORY / "examples" / "sinks" / "kafka.py", tmp_path / "kafka_sink.py")
    done = subprocess.run(
        [sys.executable, "tutorial.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("\tat ")]
    assert done.returncode == 0, "\n".join(lines[-40:])
    assert "failed: True" in lines
