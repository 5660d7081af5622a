"""An HDFS for tests: Hadoop's mini cluster, whose NameNodes and DataNodes are in one JVM, on free ports of loopback."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from py4j.java_gateway import GatewayParameters, JavaGateway

from tests.hdfs.jars import cluster_class_path
from tests.jars import java, jvm_environment
from tests.servers import LocalServer

_JVM: Final = ("-Xmx400m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_QUIET: Final = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
_DATA_NODES: Final = 2
# Files of a few megabytes have several blocks unless their writer wants others; some hundred files are several lists.
_SETTINGS: Final = {
    "dfs.blocksize": str(1 << 20),
    "dfs.namenode.fs-limits.min-block-size": str(1 << 20),
    "dfs.ls.limit": "100",
}
_NAME_SERVICE: Final = "cluster"


class HdfsCluster(LocalServer):
    """A cluster of two DataNodes, whose data is gone when it stops.

    It has one NameNode, or with `has_standby` a name service with two, of which the first is active. `settings` are
    more of Hadoop's settings for it. The process that starts it is its superuser.
    """

    def __init__(self, settings: Mapping[str, str] | None = None, *, has_standby: bool = False) -> None:
        super().__init__("hdfs")
        self._settings = {**_SETTINGS, **(settings or {})}
        self._has_standby = has_standby
        self._log = self.directory / "cluster.log"

    @property
    def location(self) -> str:
        """The root of its files, without a slash at its end."""
        return f"hdfs://{_NAME_SERVICE}" if self._has_standby else f"hdfs://127.0.0.1:{self._ports[0]}"

    @property
    def nodes(self) -> Any:
        """The ``MiniDFSCluster``."""
        return self._nodes

    @property
    def files(self) -> Any:
        """The cluster's ``DistributedFileSystem`` for the superuser, of the first NameNode."""
        return self._nodes.getFileSystem(0)

    @property
    def classes(self) -> Any:
        """Its JVM, as Py4J gives it: ``classes.java.util.HashMap()``."""
        return self._gateway.jvm

    def path(self, path: str) -> Any:
        """A ``Path`` of Hadoop's."""
        return self.classes.org.apache.hadoop.fs.Path(path)

    @property
    def client_settings(self) -> dict[str, str]:
        """Hadoop's settings by which a client finds the cluster."""
        if not self._has_standby:
            return {"fs.defaultFS": self.location, "dfs.namenode.http-address": self.web_address()}
        found = {
            "fs.defaultFS": self.location,
            "dfs.nameservices": _NAME_SERVICE,
            f"dfs.ha.namenodes.{_NAME_SERVICE}": "nn1,nn2",
            f"dfs.client.failover.proxy.provider.{_NAME_SERVICE}": (
                "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
            ),
        }
        for number, port in enumerate(self._ports):
            found |= {
                f"dfs.namenode.rpc-address.{_NAME_SERVICE}.nn{number + 1}": f"127.0.0.1:{port}",
                f"dfs.namenode.http-address.{_NAME_SERVICE}.nn{number + 1}": self.web_address(number),
            }
        return found

    def web_address(self, number: int = 0) -> str:
        """Host and port of a NameNode's WebHDFS."""
        return f"127.0.0.1:{self._web_ports[number]}"

    def write_settings(self, folder: Path, more: Mapping[str, str] | None = None) -> None:
        """Write ``core-site.xml`` for clients into a folder: for their ``HADOOP_CONF_DIR``."""
        properties = (
            f"<property><name>{name}</name><value>{value}</value></property>"
            for name, value in {**self.client_settings, **(more or {})}.items()
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "core-site.xml").write_text(f"<configuration>{''.join(properties)}</configuration>")

    def pause(self) -> None:
        """Stop its processes: they keep their connections, and do not answer."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        os.kill(self._process.pid, signal.SIGCONT)

    def _start(self) -> None:
        with self._log.open("wb") as log:
            self._process = self._spawn(
                *(java(), *_JVM, _QUIET, "-cp", cluster_class_path()),
                *("py4j.GatewayServer", "--enable-auth", "0"),
                env=jvm_environment(),
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self.directory,
                text=True,
            )
        try:
            assert self._process.stdout is not None
            port, token = (self._process.stdout.readline().strip() for _ in range(2))
            parameters = GatewayParameters(port=int(port), auth_token=token, enable_memory_management=False)
            self._gateway = JavaGateway(gateway_parameters=parameters)
            self._nodes = self._build()
            numbers = range(self._nodes.getNumNameNodes())
            self._ports = [self._nodes.getNameNodePort(number) for number in numbers]
            self._web_ports = [self._nodes.getNameNode(number).getHttpAddress().getPort() for number in numbers]
        except Exception as error:
            log_end = self._log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"HDFS did not start: {str(error)[:2000]}\n{log_end}") from None

    def _build(self) -> Any:
        hadoop = self.classes.org.apache.hadoop
        configuration = hadoop.conf.Configuration()
        for name, value in {**self._settings, "hdfs.minidfs.basedir": str(self.directory / "nodes")}.items():
            configuration.set(name, value)
        builder = hadoop.hdfs.MiniDFSCluster.Builder(configuration).numDataNodes(_DATA_NODES)
        if self._has_standby:
            builder = builder.nnTopology(hadoop.hdfs.MiniDFSNNTopology.simpleHATopology(2))
        nodes = builder.build()
        if self._has_standby:
            nodes.transitionToActive(0)
        nodes.waitActive()
        return nodes

    def stop(self) -> None:
        if process := getattr(self, "_process", None):
            process.stdout.close()
        super().stop()
