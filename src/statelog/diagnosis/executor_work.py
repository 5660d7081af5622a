"""The part of a diagnosis that runs in a Python worker of each executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

from pyspark import cloudpickle

import statelog.spark.keyed_spec  # noqa: F401 - all that tasks import must be there
from statelog.clock import SystemClock
from statelog.diagnosis.disk import check_disk
from statelog.diagnosis.driver_port import check_driver_port
from statelog.diagnosis.finding import Place
from statelog.diagnosis.limited import Check, Findings, run_limited
from statelog.diagnosis.location import CHECK, Marks, Probe, check_from_executor
from statelog.diagnosis.versions import teller
from statelog.log.open import open_retrying_store
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.spark.registered_stores import adopt_stores
from statelog.spark.worker import DriverAddress, local_base

STUCK_STORE = (
    "Is the store within reach of this host: address, proxy, firewall, credentials service? A directory of a file"
    " server that does not answer blocks like this."
)
STUCK_DISK = "Is the disk full, failing, or a file server that does not answer?"
STUCK_PORT = "Does the driver's host drop packets to its port: a firewall, a network policy? Is the driver suspended?"


@dataclass(frozen=True)
class ExecutorWork:
    """The checks of one executor; picklable."""

    address: DriverAddress | None
    """None if the driver has no endpoint."""
    probe: Probe | None
    """None if the driver itself cannot use the location."""
    options: Options
    timeout_s: float
    stores: Mapping[str, bytes]
    """The registered factories, pickled."""

    def run(self, host: str) -> dict[str, Any]:
        """Make the checks; the findings, whose place the driver completes, and marks as plain values."""
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
    # An observer need not be picklable before there is a query, and is not called.
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
