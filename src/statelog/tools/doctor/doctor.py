"""The public function, and the same in a session that the command creates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import pyspark
from pyspark.sql import SparkSession

from statelog.clock import SystemClock
from statelog.errors import StatelogError
from statelog.log.open import open_retrying_store
from statelog.metrics import Measurements
from statelog.numbers import Seconds, checked_seconds
from statelog.options import Options
from statelog.spark.driver import internals
from statelog.spark.driver.endpoint import require_endpoint
from statelog.spark.driver.interpreter import check_interpreter
from statelog.spark.plan.checks import check_options, checked_location
from statelog.spark.worker.worker import DriverAddress, pickled_stores
from statelog.storage import Store
from statelog.storage.location import scheme_of
from statelog.tools.doctor import checkpoint_location as spark_places
from statelog.tools.doctor import kafka as brokers
from statelog.tools.doctor import location as places
from statelog.tools.doctor.executor_work import STUCK_STORE, ExecutorWork, executor_function
from statelog.tools.doctor.executors import Executors
from statelog.tools.doctor.finding import DRIVER, START_CHECKS, Check, Finding, Findings, Place, run_limited
from statelog.tools.doctor.settings import SESSION_SETTINGS, make_session, setting_findings, stop_session
from statelog.tools.doctor.versions import Installed, package_findings, requirements, spark_findings, teller

_NO_SESSION: Final = (
    "Call doctor where queries are built, after SparkSession.builder...getOrCreate(); or run"
    " python -m statelog doctor LOCATION."
)


def doctor(
    location: str | Path,
    *,
    options: Options | None = None,
    kafka: str | Mapping[str, str] | None = None,
    timeout_s: Seconds = 60.0,
) -> list[Finding]:
    """Check that stateful queries can run here: on the active session's driver and executors, with state at a location.

    A small Spark job on every executor compares versions and clocks, connects to the driver's port as tasks do, and
    writes, reads and lists objects in the location. Everything that is written is below ``probe/doctor-...`` in the
    location, and is removed at the end. Running queries are not disturbed.

    Parameters
    ----------
    location : str or Path
        Where state will be stored: a checkpointLocation, or the location for operators. A missing directory is created
        for the duration of the check.
    options : Options, optional
        The operators' options, of which ``local_directory``, ``table`` and those of uploads are checked.
    kafka : str or mapping of str to str, optional
        The Kafka brokers that queries read from or write to, ``"host:9092,..."``, or all options that Spark's source or
        sink gets: ``kafka.bootstrap.servers``, the security options, and ``subscribe`` or ``topic``. By default, Kafka
        is not checked.
    timeout_s : float
        Time limit of each check, in seconds; the start of executors may take five times as long. A check that takes
        longer is reported as a finding.

    Returns
    -------
    list of Finding
        The findings: first those of the driver, then those of each executor.

    Raises
    ------
    ConfigurationError
        If an argument other than the location is wrong. Any other failure is reported as a finding.

    Examples
    --------
    >>> for finding in statelog.doctor("s3://bucket/clicks"):  # doctest: +SKIP
    ...     if finding.level != "ok":
    ...         print(finding.check, finding.where, finding.host, finding.found, finding.remedy)
    """
    diagnosis = _Diagnosis(location, options, kafka, timeout_s)
    session = SparkSession.getActiveSession()
    if session is None:
        told = diagnosis.place.error(
            "session", "There is no active Spark session: executors are not checked.", _NO_SESSION
        )
        return [told, *diagnosis.run(None)]
    return diagnosis.run(session)


def doctor_in_own_session(
    location: str | Path,
    *,
    master: str | None,
    conf: Mapping[str, str],
    kafka: Mapping[str, str] | None,
    timeout_s: float,
) -> list[Finding]:
    """The same as :func:`doctor`, in a session with these settings that ends with the call."""
    if SparkSession.getActiveSession() is not None:
        return doctor(location, kafka=kafka, timeout_s=timeout_s)
    diagnosis = _Diagnosis(location, None, kafka, timeout_s)
    session, found = make_session(master, conf, diagnosis.place, START_CHECKS * timeout_s)
    try:
        return found + diagnosis.run(session)
    finally:
        if session is not None:
            stop_session(session, diagnosis.place)


class _Diagnosis:
    """The checks of one call, in their order."""

    def __init__(
        self,
        location: str | Path,
        options: Options | None,
        kafka: str | Mapping[str, str] | None,
        timeout_s: Seconds,
    ) -> None:
        self._options = Options() if options is None else options
        check_options(self._options)
        self._kafka = brokers.kafka_options(kafka)
        self._brokers: list[brokers.Address] = []
        self._location = location
        self._timeout_s = checked_seconds(timeout_s, "timeout_s", is_positive=True)
        self._installed = Installed(**teller()())
        self.place = Place(DRIVER, self._installed.host)

    def run(self, session: SparkSession | None) -> list[Finding]:
        """Run all checks; without a session, only those of the driver's process."""
        findings = list(package_findings(self._installed, self.place, None, requirements(), self._options.table))
        if session is not None and not internals.is_classic(session):
            findings.append(
                self.place.error(
                    "session",
                    "statelog does not run on Spark Connect.",
                    "Use a classic session, made by SparkSession.builder in the driver.",
                )
            )
            session = None
        if session is not None:
            findings += self._limited("settings", partial(_of_settings, session, self.place, self._location))
            if self._kafka:
                findings += self._of_brokers(session)
        try:
            store = self._open()
        except StatelogError as error:
            findings.append(self.place.failed(places.CHECK, error))
            return findings + self._of_executors(session, None, None)
        return findings + self._of_location(session, store)

    def _of_brokers(self, session: SparkSession) -> list[Finding]:
        def ask() -> Findings:
            yield from brokers.check_from_driver(session, self._kafka, self.place, self._timeout_s, self._brokers)

        return run_limited([Check(brokers.CHECK, self.place, ask, brokers.STUCK_BROKER)], self._timeout_s)

    def _open(self) -> tuple[Store, places.Probe]:
        location = checked_location(self._location or "")
        assert location is not None
        opened = open_retrying_store(location, self._options, SystemClock(), Measurements()).own
        return opened, places.new_probe(location)

    def _of_location(self, session: SparkSession | None, opened: tuple[Store, places.Probe]) -> list[Finding]:
        store, probe = opened
        traces = places.Traces()
        findings: list[Finding] = []
        try:
            findings += self._limited(
                places.CHECK, lambda: places.check_from_driver(store, probe, self.place, SystemClock(), traces)
            )
            is_fit = all(finding.level != "error" for finding in findings)
            findings += self._of_spark_s_files(session, probe.location, store if is_fit else None)
            findings += self._of_executors(session, store, probe if is_fit else None)
        finally:
            findings += self._limited(places.CHECK, lambda: places.remove_probe(store, probe, self.place, traces))
            store.close()
        return findings

    def _of_spark_s_files(self, session: SparkSession | None, location: str, store: Store | None) -> list[Finding]:
        """Check that Spark can keep its checkpoint there, if this depends on settings."""
        if session is None or scheme_of(location) != spark_places.SCHEME:
            return []
        check = partial(spark_places.check_checkpoint_location, session, location, store, self.place)
        return run_limited([Check(spark_places.CHECK, self.place, check, spark_places.STUCK)], self._timeout_s)

    def _of_executors(
        self, session: SparkSession | None, store: Store | None, probe: places.Probe | None
    ) -> list[Finding]:
        """Run the checks that need Spark; those of the location only with a probe, which must be in the store."""
        if session is None:
            return []
        findings = self._limited("python", partial(_of_interpreter, session))
        addresses: list[DriverAddress] = []
        findings += self._limited("driver-port", partial(_of_endpoint, session, addresses))
        try:
            stores = pickled_stores()
        except StatelogError as error:
            findings.append(self.place.failed(places.CHECK, error))
            probe, stores = None, b""
        if any(finding.level == "error" for finding in findings if finding.check == "python"):
            return findings
        work = ExecutorWork(
            addresses[0] if addresses else None, probe, self._options, self._timeout_s, stores, self._brokers
        )
        try:
            executors = Executors(session, executor_function(work), self._installed, self._options.table)
            reports = executors.ask(self._timeout_s)
        except Exception as error:  # for example, the session has ended meanwhile
            return [*findings, self.place.failed("executors", error)]
        findings += reports.findings
        if store is not None and probe is not None:
            findings += self._limited(
                places.SHARED, lambda: places.check_marks(store, probe, self.place, reports.marks)
            )
        return findings

    def _limited(self, name: str, run: Callable[[], Findings]) -> list[Finding]:
        return run_limited([Check(name, self.place, run, STUCK_STORE)], self._timeout_s)


def _of_interpreter(session: SparkSession) -> Findings:
    """Ask the interpreter of a local master's workers; errors become findings."""
    check_interpreter(session)
    yield from ()


def _of_endpoint(session: SparkSession, addresses: list[DriverAddress]) -> Findings:
    """Note the address of the endpoint of this process, which is opened if no query has opened it."""
    host, endpoint = require_endpoint(session)
    addresses.append(DriverAddress(host, endpoint.port, endpoint.secret, endpoint.certificate))
    yield from ()


def _of_settings(session: SparkSession, place: Place, location: str | Path) -> Findings:
    """Judge Spark's version, and the settings of the application and of its session."""
    yield from spark_findings(session.version, pyspark.__version__, place)
    conf = dict(session.sparkContext.getConf().getAll())
    own = {name: value for name in SESSION_SETTINGS if (value := session.conf.get(name, None)) is not None}
    yield from setting_findings(conf | own, place, is_local=scheme_of(str(location)) in ("", "file"))
