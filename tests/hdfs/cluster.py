"""An HDFS for tests: Hadoop's mini cluster, whose NameNodes and DataNodes are in one JVM, on free ports of loopback."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyspark
from py4j.java_gateway import GatewayParameters, JavaGateway

from tests.jars import HDFS, java, jvm_environment
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
_LOGIN: Final = ("kerberos.principal", "keytab.file")


class HdfsCluster(LocalServer):
    """A cluster of two DataNodes, whose data is gone when it stops.

    It has one NameNode, or with `has_standby` a name service with two, of which the first is active. The process that
    starts it is its superuser, or with `has_kerberos` the user ``hdfs``.
    """

    def __init__(self, *, has_standby: bool = False, has_kerberos: bool = False) -> None:
        super().__init__("hdfs")
        self._settings = dict(_SETTINGS)
        self._has_standby = has_standby
        self._has_kerberos = has_kerberos
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
        found = {
            "fs.defaultFS": self.location,
            "hadoop.security.authentication": "kerberos" if self._has_kerberos else "simple",
        }
        if not self._has_standby:
            return {**found, "dfs.namenode.http-address": self.web_address()}
        found |= {
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

    def write_token(self, path: Path) -> Any:
        """Write a file with a delegation token of a cluster with Kerberos, and return the token."""
        token = self.nodes.getNameNodeRpc().getDelegationToken(self.classes.org.apache.hadoop.io.Text("hdfs"))
        service = self.classes.org.apache.hadoop.io.Text(f"127.0.0.1:{self._ports[0]}")
        token.setService(service)
        credentials = self.classes.org.apache.hadoop.security.Credentials()
        credentials.addToken(service, token)
        target = self.classes.java.io.DataOutputStream(self.classes.java.io.FileOutputStream(str(path)))
        credentials.writeTokenStorageToStream(target)
        target.close()
        return token

    def pause(self) -> None:
        """Stop its processes: they keep their connections, and do not answer."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        os.kill(self._process.pid, signal.SIGCONT)

    def _start(self) -> None:
        [py4j] = Path(pyspark.__file__).parent.glob("jars/py4j-*.jar")
        with self._log.open("wb") as log:
            self._process = self._spawn(
                *(java(), *_JVM, _QUIET, "-cp", os.pathsep.join([str(HDFS.folder / "*"), str(py4j)])),
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
        if self._has_kerberos:
            self._settings |= self._start_kerberos()
        configuration = hadoop.conf.Configuration()
        for name, value in {**self._settings, "hdfs.minidfs.basedir": str(self.directory / "nodes")}.items():
            configuration.set(name, value)
        if self._has_kerberos:
            users = hadoop.security.UserGroupInformation
            users.setConfiguration(configuration)
            users.loginUserFromKeytab(*(self._settings[f"dfs.namenode.{name}"] for name in _LOGIN))
        builder = hadoop.hdfs.MiniDFSCluster.Builder(configuration).numDataNodes(_DATA_NODES)
        if self._has_standby:
            builder = builder.nnTopology(hadoop.hdfs.MiniDFSNNTopology.simpleHATopology(2))
        nodes = builder.build()
        if self._has_standby:
            nodes.transitionToActive(0)
        nodes.waitActive()
        return nodes

    def _start_kerberos(self) -> dict[str, str]:
        """Start Hadoop's Kerberos for tests, and return the settings for a cluster with it."""
        new_file, kerberos = self.classes.java.io.File, self.classes.org.apache.hadoop.minikdc.MiniKdc
        kdc = kerberos(kerberos.createConf(), new_file(str(self.directory / "kerberos")))
        kdc.start()
        names = self._gateway.new_array(self.classes.java.lang.String, 2)
        names[0], names[1] = "hdfs/localhost", "HTTP/localhost"
        keytab = str(self.directory / "keytab")
        kdc.createPrincipal(new_file(keytab), names)
        server, web = (f"{name}@{kdc.getRealm()}" for name in names)
        return {
            "hadoop.security.authentication": "kerberos",
            "hadoop.security.authorization": "true",
            "dfs.block.access.token.enable": "true",
            "dfs.data.transfer.protection": "authentication",
            "ignore.secure.ports.for.testing": "true",
            "dfs.namenode.kerberos.principal": server,
            "dfs.namenode.keytab.file": keytab,
            "dfs.datanode.kerberos.principal": server,
            "dfs.datanode.keytab.file": keytab,
            "dfs.web.authentication.kerberos.principal": web,
            "dfs.web.authentication.kerberos.keytab": keytab,
            "dfs.namenode.kerberos.internal.spnego.principal": web,
            "hadoop.http.authentication.type": "kerberos",
            "hadoop.http.authentication.kerberos.principal": web,
            "hadoop.http.authentication.kerberos.keytab": keytab,
        }

    def stop(self) -> None:
        if process := getattr(self, "_process", None):
            process.stdout.close()
        super().stop()
