"""Spark on several hosts: the master, workers, two hosts for drivers, an S3 server for the state, and Kafka."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import pyspark

import statelog
from tests.cluster.hosts import Host, Network, missing_for_hosts, wait_until
from tests.jars import KAFKA, missing_server, spark_jars
from tests.jvm import jvm_options
from tests.s3.server import BUCKET, missing_programs

NETWORK_TIMEOUT_S: Final = 15
DRIVERS: Final = ("driver", "driver2")
WORKERS: Final = ("worker1", "worker2", "worker3")
EXECUTORS: Final = 3
PARALLELISM: Final = 3

MASTER: Final = "org.apache.spark.deploy.master.Master"
WORKER: Final = "org.apache.spark.deploy.worker.Worker"
EXECUTOR: Final = "CoarseGrainedExecutorBackend"
PYTHON_DAEMON: Final = "pyspark.daemon"
DRIVER_PROGRAM: Final = "tests.cluster.driver"
BROKER: Final = "kafka.Kafka"
DRIVER_JVM: Final = "org.apache.spark.deploy.SparkSubmit"
"""Words in the command lines of Spark's processes."""

_REPOSITORY: Final = Path(__file__).parents[2]
_SPARK: Final = Path(pyspark.__file__).parent
_START_S: Final = 120.0
_JVM: Final = ("-XX:-UsePerfData",)  # its files are named by process number, of which hosts have the same
_SERVER_BYTES: Final = 1 << 30
# A worker has room for two executors: a lost one, or those of a second driver, find a place at once.
_EXECUTOR_CORES: Final = 2
_CORES: Final = 2 * _EXECUTOR_CORES
_MEMORY: Final = "2g"
_RECOVERY: Final = "-Dspark.deploy.recoveryMode=FILESYSTEM -Dspark.deploy.recoveryDirectory"
_SETTINGS: Final = {
    **statelog.spark_conf(),
    "spark.cores.max": str(EXECUTORS * _EXECUTOR_CORES),
    "spark.executor.cores": str(_EXECUTOR_CORES),
    "spark.executor.memory": "512m",
    "spark.decommission.enabled": "true",
    "spark.excludeOnFailure.taskAndStage.enabled": "true",
    "spark.log.level": "WARN",
    "spark.executor.heartbeatInterval": "3s",
    "spark.network.timeout": f"{NETWORK_TIMEOUT_S}s",
    "spark.network.timeoutInterval": "5s",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


def calls_name(driver: str) -> str:
    """The name of the address at which the coordinator takes calls; Spark uses the other one of the driver's host."""
    return f"{driver}-calls"


def missing_for_cluster() -> str:
    """Why there can be no cluster here; empty if there can."""
    missing = missing_for_hosts()
    return missing or ", ".join(f"{name} is missing" for name in missing_programs()[:1])


@dataclass(frozen=True)
class Driver:
    """A driver's process on a host, and the folder in which it writes what happens."""

    host: Host
    process: subprocess.Popen[Any]
    folder: Path

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Why its query has ended, each time."""
        file = self.folder / "failures.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def executors(self) -> list[str]:
        """The hosts of its executors, as it has seen them last."""
        file = self.folder / "executors.json"
        found: list[str] = json.loads(file.read_text()) if file.exists() else []
        return found

    @property
    def outputs(self) -> dict[int, Path]:
        """The output of each batch."""
        return {int(path.stem.removeprefix("output-")): path for path in self.folder.glob("output-*.json")}

    def stop(self) -> None:
        """Ask it to stop, and wait until it has."""
        Path(self.folder, "stop").touch()
        wait_until(lambda: self.process.poll() is not None, "the end of the driver", _START_S)


class SparkHosts:
    """The hosts, as a context manager; nothing of them is left at the end."""

    def __init__(self) -> None:
        self.network = Network()
        self._stack = ExitStack()
        self._store: dict[str, str] = {}
        self._drivers = 0
        self.missing_kafka = missing_server(KAFKA)
        """Why there is no broker, and the query reads Spark's own source; empty if there is one."""
        self._broker = ""

    @property
    def location(self) -> str:
        """A folder in the bucket."""
        return f"s3://{BUCKET}/state"

    @property
    def checkpoint(self) -> Path:
        """Spark's checkpointLocation, which all hosts see."""
        return self.network.shared / "checkpoint"

    @property
    def workers(self) -> list[Host]:
        """The hosts with workers that are switched on."""
        return [host for name, host in self.network.hosts.items() if name.startswith("worker")]

    def host(self, name: str) -> Host:
        """A host that is switched on."""
        return self.network.hosts[name]

    def start_master(self) -> None:
        """Start the master, which remembers what it knew when it was killed, and wait until it is ready."""

        def starts() -> int:
            log = self._log("master")
            text = log.read_text() if log.exists() else ""
            return text.count("New state: ALIVE") + text.count("Recovery complete")

        before = starts()
        self._start_class(self.host("master"), MASTER, "--host", "master", "--port", "7077")
        wait_until(lambda: starts() > before, "the master", _START_S)

    def add_driver_hosts(self) -> None:
        """Switch the hosts for drivers on, unless they are."""
        for name in DRIVERS:
            if name not in self.network.hosts:
                self.network.add(name, other_name=calls_name(name))

    def start_workers(self, *names: str, clock_ahead_s: int = 0) -> None:
        """Start workers, on new hosts if there are none of these names, and wait until the master has them."""
        before = {name: self._registrations(name) for name in names}
        for name in names:
            host = self.network.hosts.get(name) or self.network.add(name)
            command = ("--host", name, "--cores", str(_CORES), "--memory", _MEMORY, "--work-dir", f"{host.disk}/work")
            self._start_class(host, WORKER, *command, "spark://master:7077", clock_ahead_s=clock_ahead_s)

        def are_registered() -> bool:
            return all(self._registrations(name) > before[name] for name in names)

        wait_until(are_registered, f"{', '.join(names)} to register", _START_S)

    def stop_worker(self, name: str) -> None:
        """Kill a worker and its executors."""
        host = self.host(name)
        for words in (WORKER, EXECUTOR, PYTHON_DAEMON):
            if host.processes(words):
                host.kill(words)
        wait_until(lambda: not host.processes(EXECUTOR), f"the executors of {name} to end")

    def start_driver(self, name: str, clock_ahead_s: int = 0) -> Driver:
        """Start the driver's program on a host."""
        host = self.host(name)
        self._drivers += 1
        folder = self.network.shared / f"driver-{self._drivers}"
        folder.mkdir()
        arguments = {
            "folder": str(folder),
            "master": "spark://master:7077",
            "location": self.location,
            "checkpoint": str(self.checkpoint),
            "parallelism": PARALLELISM,
            "broker": self._broker,
            "settings": {
                **_SETTINGS,
                **(spark_jars(KAFKA) if self._broker else {}),
                "spark.driver.host": name,
                "spark.statelog.coordinator.host": calls_name(name),
            },
        }
        process = host.start(
            *(sys.executable, "-m", DRIVER_PROGRAM, json.dumps(arguments)),
            log=self._log(f"{name}-{self._drivers}"),
            env=self._environment(host, clock_ahead_s),
        )
        return Driver(host, process, folder)

    def run_python(self, program: str) -> str:
        """Run a Python program on the master's host, which no harm cuts off, and return what it prints."""
        host = self.host("master")
        return host.run(sys.executable, "-c", program, env=self._environment(host))

    def ends_of_logs(self) -> str:
        """The last lines of all logs."""
        logs = sorted(self.network.shared.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.network)
            self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.network.add("master")
        self.add_driver_hosts()
        await_store = self._start_server("store")
        await_broker = None if self.missing_kafka else self._start_server("broker")
        self.start_master()
        self._store = json.loads(await_store())
        self._broker = await_broker() if await_broker else ""
        self.start_workers(*WORKERS)

    def _start_server(self, name: str) -> Callable[[], str]:
        """Start a server's program on a host of its own; the returned function waits, and returns what it wrote."""
        host, found = self.network.add(name, disk_bytes=_SERVER_BYTES), self.network.shared / f"{name}.found"
        program = (sys.executable, "-m", f"tests.cluster.{name}", host.address, str(found))
        process = host.start(*program, log=self._log(name), env=self._environment(host))

        def wait() -> str:
            wait_until(lambda: found.exists() or process.poll() is not None, f"the {name}", _START_S)
            if not found.exists():
                raise RuntimeError(f"The {name} did not start.\n{self.ends_of_logs()}")
            return found.read_text()

        return wait

    def _start_class(self, host: Host, name: str, *arguments: str, clock_ahead_s: int = 0) -> None:
        command = (str(_SPARK / "bin" / "spark-class"), name, *arguments)
        host.start(*command, log=self._log(host.name), env=self._environment(host, clock_ahead_s))

    def _registrations(self, name: str) -> int:
        """How often a worker of a host has registered with the master."""
        log = self._log(name)
        return log.read_text().count("Successfully registered with master") if log.exists() else 0

    def _log(self, name: str) -> Path:
        return self.network.shared / f"{name}.log"

    def _environment(self, host: Host, clock_ahead_s: int = 0) -> dict[str, str]:
        """The environment of processes on a host: the caller's, without what leads elsewhere."""
        others = ("AWS_", "HADOOP_", "SPARK_", "HTTP_", "HTTPS_", "ALL_", "NO_", "OTEL_")
        kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(others)}
        folders = [str(_REPOSITORY / "tests" / "cluster" / "clock"), str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]
        timeouts = f"-Dspark.worker.timeout={NETWORK_TIMEOUT_S}"
        java = [*jvm_options(os.environ.get("STATELOG_TEST_CLASSES", "")), *_JVM, f"-Djava.io.tmpdir={host.disk}/tmp"]
        return {
            **kept,
            **self._store,
            "HOME": str(host.disk),
            "TMPDIR": f"{host.disk}/tmp",
            "JDK_JAVA_OPTIONS": " ".join(java),
            "PYTHONPATH": os.pathsep.join(part for part in folders if part),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": str(_SPARK),
            "SPARK_LOCAL_IP": host.address,
            "SPARK_LOCAL_DIRS": f"{host.disk}/local",
            "SPARK_DAEMON_MEMORY": "384m",
            "SPARK_MASTER_OPTS": f"{timeouts} {_RECOVERY}={host.disk}/recovery",
            "SPARK_WORKER_OPTS": f"{timeouts} -Dspark.decommission.enabled=true",
            "TESTS_CLOCK_AHEAD_S": str(clock_ahead_s),
        }
