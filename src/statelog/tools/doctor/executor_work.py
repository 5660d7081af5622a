"""The part of a diagnosis that runs in a Python worker of each executor."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Final

from pyspark import cloudpickle

import statelog.spark.worker.specs  # noqa: F401 - all that tasks import must be there
from statelog.clock import Clock, SystemClock
from statelog.errors import ProtocolError
from statelog.log.open import open_retrying_store
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.rpc.calls import RpcClient
from statelog.rpc.channel import RpcPolicy
from statelog.rpc.messages import Ping, Pinged
from statelog.spark.worker.worker import DriverAddress, adopt_stores, local_base
from statelog.tools.doctor import kafka
from statelog.tools.doctor.finding import Check, Finding, Findings, Place, run_limited
from statelog.tools.doctor.location import CHECK, Marks, Probe, check_from_executor
from statelog.tools.doctor.versions import teller

STUCK_STORE = (
    "Check whether this host can reach the store: address, proxy, firewall, credentials service. A directory on a file"
    " server that does not answer blocks in the same way."
)
STUCK_DISK = "Check whether the disk is full or failing, or on a file server that does not answer."
STUCK_PORT = (
    "Check whether a firewall or a network policy drops packets to the driver's port, and whether the driver is"
    " suspended."
)


@dataclass(frozen=True)
class ExecutorWork:
    """The checks of one executor; picklable."""

    address: DriverAddress | None
    """None if the driver has no endpoint."""
    probe: Probe | None
    """None if the driver itself cannot use the location."""
    options: Options
    timeout_s: float
    stores: bytes
    """See :func:`pickled_stores`; empty if they cannot be sent, and then there is no `probe`."""
    brokers: Sequence[kafka.Address] = ()
    """The addresses of Kafka brokers."""

    def run(self, host: str) -> dict[str, Any]:
        """Run the checks; returns the findings, whose place the driver completes, and marks as plain values."""
        place, clock = Place("", host), SystemClock()
        marks: list[Marks] = []
        base = local_base(self.options)
        checks = [Check("local-disk", place, lambda: check_disk(base, place), STUCK_DISK)]
        if self.address is not None:
            address = self.address
            checks.append(
                Check(
                    "driver-port",
                    place,
                    lambda: check_driver_port(address, place, clock, self.timeout_s / 2),
                    STUCK_PORT,
                )
            )
        if self.brokers:
            checks.append(
                Check(
                    kafka.CHECK,
                    place,
                    lambda: kafka.check_from_executor(self.brokers, place, clock, self.timeout_s / 2),
                    kafka.STUCK_BROKER,
                )
            )
        if self.probe is not None:
            probe = self.probe
            checks.append(Check(CHECK, place, lambda: self._of_location(probe, place, marks), STUCK_STORE))
        found = run_limited(checks, self.timeout_s)
        return {"findings": [astuple(one) for one in found], "marks": [astuple(one) for one in marks]}

    def _of_location(self, probe: Probe, place: Place, marks: list[Marks]) -> Findings:
        adopt_stores(self.stores)
        store = open_retrying_store(probe.location, self.options, SystemClock(), Measurements())
        try:
            yield from check_from_executor(store.own, probe, place, marks.append)
        finally:
            store.close()


def executor_function(work: ExecutorWork) -> Callable[[Any], Iterator[str]]:
    """Make the function that Spark sends to the workers; it returns a report as JSON.

    It is pickled by value and holds only bytes, so a worker that cannot import statelog can report just that.
    """
    # An observer need not be picklable before there is a query, and no check calls it.
    work = replace(work, options=replace(work.options, observer=Options().observer))
    pickled: bytes = cloudpickle.dumps(work)  # type: ignore[no-untyped-call]  # pyspark's copy has no types
    tell = teller()

    def run(rows: Any) -> Any:
        import json
        import pickle

        from pyspark import TaskContext

        installed = tell()
        context: Any = TaskContext.get()
        report = {"installed": installed, "stage": context.stageId(), "task": context.taskAttemptId()}
        try:
            loaded = pickle.loads(pickled)
        except Exception as error:
            report["import_error"] = f"{type(error).__name__}: {error}"
        else:
            report.update(loaded.run(installed["host"]))
        yield json.dumps(report)

    return run


# ---- The folder of the local copies ----


_LOWEST_BYTES: Final = 1 << 30
_GB: Final = 1e9
_REMEDY: Final = (
    "Tasks keep copies of their state there. Give the host a larger local disk, or name a folder on another one with"
    " Options(local_directory=...)."
)


def check_disk(base: Path, place: Place, free_bytes: Callable[[Path], int] | None = None) -> Findings:
    """Whether the folder is writable and has free space. The first task creates `base` if it does not exist."""
    folder = base / "statelog"
    try:
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder, prefix=".statelog-doctor-") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield place.error(
            "local-disk",
            f"{base}: a file in {folder} cannot be written: {error.strerror or error}.",
            "Make it writable for the user of the Python workers and free space on it, or name another folder with"
            " Options(local_directory=...).",
        )
        return
    free = (free_bytes or _free_bytes)(folder)
    told = f"{base} is writable and has {free / _GB:.1f} GB of free space."
    yield place.ok("local-disk", told) if free >= _LOWEST_BYTES else place.warning("local-disk", told, _REMEDY)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


# ---- The driver's port and clock ----


_PINGS: Final = 5
_CLOCK_LIMIT_S: Final = 5.0
_LOOPBACK: Final = ("127.", "localhost", "::1")


def check_driver_port(address: DriverAddress, place: Place, clock: Clock, timeout_s: float) -> Findings:
    """Connect to the driver's endpoint as tasks do, and compare the clocks."""
    where = f"{address.host}:{address.port}"
    policy = RpcPolicy(call_timeout_s=timeout_s, handshake_timeout_s=timeout_s)
    try:
        client = RpcClient(
            address.host, address.port, address.secret, policy, certificate=address.certificate, clock=clock
        )
        try:
            trips = [_round_trip(client, clock, place.host) for _ in range(_PINGS)]
        finally:
            client.close()
    except ProtocolError as error:
        yield place.error("driver-port", error.message[:1].upper() + error.message[1:], _remedy(address, error))
        return
    trip_s, ahead_s = min(trips)
    yield place.ok("driver-port", f"{where} answers in {trip_s * 1000:.1f} ms.")
    yield clock_finding(ahead_s, trip_s, place)


def clock_finding(ahead_s: float, trip_s: float, place: Place) -> Finding:
    """Judge how far a clock is ahead of the driver's, after a round trip in which the driver may reply at any time."""
    if abs(ahead_s) - trip_s / 2 <= _CLOCK_LIMIT_S:
        return place.ok("clock", f"The clock is {abs(ahead_s):.3f} s off the driver's.")
    return place.warning(
        "clock",
        f"The clock is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the driver's.",
        "Use NTP (chrony, systemd-timesyncd) to set the clocks of all hosts: the ages of stored objects and of pins"
        " are measured between them, and object stores refuse requests with a wrong time.",
    )


def _round_trip(client: RpcClient, clock: Clock, host: str) -> tuple[float, float]:
    """How long a call takes, and how far this clock is ahead of the driver's, in seconds."""
    begun_s, now_s = clock.monotonic_s(), clock.now_s()
    reply = client.call(Ping(f"the doctor on {host}"))
    trip_s = clock.monotonic_s() - begun_s
    assert isinstance(reply, Pinged)
    return trip_s, now_s + trip_s / 2 - reply.now_s


def _remedy(address: DriverAddress, error: ProtocolError) -> str:
    if address.host.startswith(_LOOPBACK):
        return (
            f"{address.host} is every host's own address: set spark.driver.host, or spark.statelog.coordinator.host, to"
            " an address of the driver that the executors can reach."
        )
    return (
        f"{error.hint.rstrip('.')}, and open that port in firewalls, security groups and network policies. If"
        " it is unset, any free port is taken. spark.driver.bindAddress is the address that the driver listens on."
    )
