"""A real S3 server for tests: one Ceph monitor, one object storage daemon in memory, and the gateway that speaks S3."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.request
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Final

import obstore
from obstore.store import S3Store

from tests.servers import LocalServer, free_ports

PROGRAMS: Final = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "ceph", "ceph-authtool", "monmaptool", "setpriv")

_ACCESS_KEY: Final = "test-access-key"
_SECRET_KEY: Final = "test-secret-key"
_START_S: Final = 90.0

# Without tcp_nodelay some answers take 40 ms. Short intervals of the monitor and its clients, and pools of few groups,
# make the start take 2 s instead of 13. Of large objects that are deleted most bytes are freed by a collection, which
# would wait for two hours.
_CONFIGURATION: Final = """
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{monitor_port}]
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_ipv6 = false
keyring = {directory}/keyring
run_dir = {directory}
admin_socket =
pid_file =
log_file = {directory}/$name.log
log_to_stderr = false
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pgp_num = 4
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
[mon]
mon_data = {directory}/mon
mon_data_avail_crit = 1
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
[osd]
osd_data = {directory}/osd
osd_objectstore = memstore
memstore_device_bytes = {memory_bytes}
[client]
objecter_tick_interval = 0.5
rgw_frontends = beast endpoint={host}:{port} tcp_nodelay=1
rgw_data = {directory}/rgw
rgw_thread_pool_size = 64
rgw_run_sync_thread = false
rgw_gc_obj_min_wait = 5
rgw_gc_processor_period = 5
"""

BUCKET = "statelog-tests"
"""The bucket of the tests."""


def missing_programs() -> list[str]:
    """What must be installed before a server can be started."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class RadosGateway(LocalServer):
    """An S3 server, whose data is gone when it stops.

    Parameters
    ----------
    memory_bytes : int
        How much it can hold. What is deleted is freed some seconds later.
    host : str
        The address at which it listens; by default loopback's.
    """

    def __init__(self, memory_bytes: int = 4 << 30, *, host: str = "127.0.0.1") -> None:
        super().__init__("s3-server")
        self._memory_bytes = memory_bytes
        self._host = host
        self._monitor_port, self._port = free_ports(2)

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"http://{self._host}:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which clients find it and are let in."""
        return {
            "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ALLOW_HTTP": "true",
        }

    def create_bucket(self, name: str) -> None:
        """Make a bucket, which the library used elsewhere cannot; so it only signs the request."""
        store = S3Store(
            name,
            endpoint=self.address,
            region="us-east-1",
            access_key_id=_ACCESS_KEY,
            secret_access_key=_SECRET_KEY,
        )
        address = obstore.sign(store, "PUT", "", timedelta(minutes=5))
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            urllib.request.Request(address, data=b"", method="PUT"), timeout=_START_S
        ).close()

    def _start(self) -> None:
        directory = self.directory
        fsid, osd = uuid.uuid4(), uuid.uuid4()
        for folder in ("mon", "osd", "rgw"):
            (directory / folder).mkdir()
        (directory / "ceph.conf").write_text(
            _CONFIGURATION.format(
                fsid=fsid,
                directory=directory,
                monitor_port=self._monitor_port,
                host=self._host,
                port=self._port,
                memory_bytes=self._memory_bytes,
            )
        )
        # The keys are those that the monitor starts with; so nothing has to be registered later.
        everything = [argument for daemon in ("mon", "osd", "mgr") for argument in ("--cap", daemon, "allow *")]
        self._run("ceph-authtool", "--create-keyring", "keyring", "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        for name in ("client.admin", "osd.0"):
            self._run("ceph-authtool", "keyring", "--gen-key", "-n", name, *everything)
        monitor = f"[v2:127.0.0.1:{self._monitor_port}]"
        self._run("monmaptool", "--create", "--addv", "a", monitor, "--fsid", str(fsid), "monmap")
        self._run("ceph-mon", "-i", "a", "--mkfs", "--monmap", "monmap", "--keyring", "keyring")
        self._launch("ceph-mon", "-f", "-i", "a")
        self._wait_for("127.0.0.1", self._monitor_port)
        self._run("ceph", "osd", "new", str(osd))
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", str(osd))
        self._launch("ceph-osd", "-f", "-i", "0")
        keys = ("--access-key", _ACCESS_KEY, "--secret-key", _SECRET_KEY)
        self._run("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test", *keys)
        self._launch("radosgw", "-f", "-n", "client.admin")
        self._wait_for(self._host, self._port)

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, cwd=self.directory, env=self._own_environment(), capture_output=True, text=True, timeout=_START_S
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}\n{self._logs()}")

    def _launch(self, *command: str) -> None:
        with open(self.directory / "output.log", "ab") as output:
            self._spawn(*command, cwd=self.directory, env=self._own_environment(), stdout=output, stderr=output)

    def _wait_for(self, host: str, port: int) -> None:
        """Wait until a process takes connections there; clients of Ceph that come too early wait for seconds."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.is_running:
            with suppress(OSError):
                socket.create_connection((host, port), timeout=1.0).close()
                return
            time.sleep(0.02)
        raise RuntimeError(f"The S3 server did not start.\n{self._logs()}")

    def _own_environment(self) -> dict[str, str]:
        return {**os.environ, "CEPH_CONF": str(self.directory / "ceph.conf"), "LC_ALL": "C.UTF-8"}

    def _logs(self) -> str:
        ends = (f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in self.directory.glob("*.log"))
        return "\n".join(ends)
