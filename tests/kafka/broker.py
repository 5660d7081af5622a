"""A Kafka broker for tests: one process, both broker and controller, on free ports of one address."""

from __future__ import annotations

import base64
import os
import subprocess
import time
from typing import BinaryIO, Final

from tests.jars import KAFKA, java, jvm_environment
from tests.servers import LocalServer, free_ports

_START_S: Final = 90.0
_POLL_S: Final = 0.05
_STARTED: Final = "Kafka Server started"

# Its own topics have one copy and one partition. What is compacted goes soon.
_SETTINGS: Final = """
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://{host}:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://{host}:{port}
controller.listener.names=CONTROLLER
controller.quorum.bootstrap.servers=127.0.0.1:{controller_port}
log.dirs={directory}/data
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
log.cleaner.backoff.ms=200
log.cleaner.dedupe.buffer.size=8388608
"""
_JVM: Final = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_QUIET: Final = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
_SAYS_WHEN_IT_IS_UP: Final = "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info"


class KafkaBroker(LocalServer):
    """A broker whose data is gone when it stops."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__("kafka")
        self._host = host
        self._log = self.directory / "broker.log"
        self._settings = self.directory / "server.properties"
        self._port, self._controller_port = free_ports(2)

    @property
    def address(self) -> str:
        """Where it listens: ``kafka.bootstrap.servers``."""
        return f"{self._host}:{self._port}"

    def start_again(self) -> None:
        """Start a broker that was killed, on the data that it had."""
        with self._log.open("wb") as log:
            self._processes.clear()
            self._serve(log)

    def _start(self) -> None:
        places = {"host": self._host, "port": self._port, "controller_port": self._controller_port}
        self._settings.write_text(_SETTINGS.format(directory=self.directory, **places))
        # With a first byte of 0, the id does not begin with "-", which the program would take for an option.
        cluster = base64.urlsafe_b64encode(b"\0" + os.urandom(15)).decode().rstrip("=")
        with self._log.open("wb") as log:
            subprocess.run(
                self._java(
                    "kafka.tools.StorageTool", "format", "--standalone", "-t", cluster, "-c", str(self._settings)
                ),
                env=jvm_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
                timeout=_START_S,
            )
            self._serve(log)

    def _serve(self, log: BinaryIO) -> None:
        """Start the broker's process, and wait until it takes requests."""
        command = self._java("kafka.Kafka", str(self._settings))
        self._spawn(*command, env=jvm_environment(), stdout=log, stderr=log)
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and self.is_running:
            if _STARTED in self._log.read_text(errors="replace"):
                return
            time.sleep(_POLL_S)
        raise RuntimeError(f"Kafka did not start.\n{self._log.read_text(errors='replace')[-3000:]}")

    def _java(self, program: str, *arguments: str) -> list[str]:
        return [
            java(),
            *_JVM,
            _QUIET,
            _SAYS_WHEN_IT_IS_UP,
            "-cp",
            str(KAFKA.folder / "broker" / "*"),
            program,
            *arguments,
        ]
