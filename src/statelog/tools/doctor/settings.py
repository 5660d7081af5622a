"""The session of a diagnosis, and what its settings mean for stateful queries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from pyspark.sql import SparkSession

from statelog.errors import ConfigurationError
from statelog.spark.driver import internals
from statelog.spark.driver.encryption import AES, AUTHENTICATE, RPC_SSL, SASL, encrypts_traffic, is_on
from statelog.spark.plan.placement import CHECKPOINT_MANAGER, may_have_several_executors, what_moves_subtasks
from statelog.tools.doctor.finding import Check, Finding, Findings, Place, run_limited

_SPECULATION: Final = "spark.speculation"
_DYNAMIC: Final = "spark.dynamicAllocation.enabled"
_EXCLUDES: Final = ("spark.excludeOnFailure.taskAndStage.enabled", "spark.excludeOnFailure.enabled")
"""The first that is set counts."""
_CACHED_IDLE: Final = "spark.dynamicAllocation.cachedExecutorIdleTimeout"
NO_DATA: Final = "spark.sql.streaming.noDataMicroBatches.enabled"

_CLEAR: Final = (
    "the traffic between driver and executors is not encrypted: anyone who reads it sees rows, changes of state, and"
    " the secret by which tasks call the driver"
)
_ENCRYPT: Final = (
    f"Set {AUTHENTICATE} and {AES} to true, or {RPC_SSL} with its keys: then tasks call the driver with TLS."
)
_IO: Final = "spark.io.encryption.enabled"
_WEB: Final = "spark.ssl.enabled"
_FALLBACK: Final = "spark.network.crypto.saslFallback"
_TRUST: Final = ("spark.ssl.rpc.trustStore", "spark.ssl.trustStore")


SESSION_SETTINGS: Final = (NO_DATA, CHECKPOINT_MANAGER)
"""The settings that a session may have in addition to those of its application."""


def setting_findings(conf: Mapping[str, str], place: Place, *, is_local: bool = False) -> Iterator[Finding]:
    """What the settings of an application, and of its session, mean for stateful operators.

    `is_local` says that the location is in a file system.
    """
    yield from _of_placement(conf, place)
    if is_local and CHECKPOINT_MANAGER not in conf:
        yield place.ok(
            "checkpoint-files",
            "In a directory, Spark starts some 20 processes per micro-batch for its own files of a checkpointLocation,"
            " which may take 0.1 s. Settings that avoid most of them: statelog.spark_conf(local_checkpoints=True), if"
            " all checkpointLocations are directories; see docs/tuning.md.",
        )
    if not is_on(conf, NO_DATA, default=True):
        yield place.warning(
            "settings",
            f"{NO_DATA} is false: timers and windows in event time wait for the next data.",
            f"Remove {NO_DATA}, unless this is intended.",
        )
    yield from _of_encryption(conf, place)


def _of_placement(conf: Mapping[str, str], place: Place) -> Iterator[Finding]:
    if is_on(conf, _SPECULATION):
        yield place.error(
            "placement",
            f"{_SPECULATION} is on, so stateful operators refuse to start: two attempts would run at the same time.",
            f"Set {_SPECULATION} to false.",
        )
    if not may_have_several_executors(conf):
        yield place.ok("placement", "There is one executor, so subtasks cannot move.")
        return
    cause = what_moves_subtasks(conf)
    if cause:
        yield place.warning(
            "placement",
            f"Subtasks will not stay on their executors, and will fetch state repeatedly, because {cause}.",
            "Call SparkSession.builder.config(map=statelog.spark_conf()) before the session is created, and leave"
            " spark.locality.wait at 3s; see docs/placement.md.",
        )
    else:
        yield place.ok("placement", "Spark's settings let subtasks stay on their executors.")
    if not next((is_on(conf, name) for name in _EXCLUDES if name in conf), False):
        yield place.ok(
            "placement",
            "Spark repeats a failed task on the same executor, even if its local disk is full, and then the query ends."
            f" With {_EXCLUDES[0]}=true it is repeated on another one; see docs/platforms.md.",
        )
    if is_on(conf, _DYNAMIC) and _CACHED_IDLE in conf:
        yield place.warning(
            "placement",
            f"{_CACHED_IDLE} is {conf[_CACHED_IDLE]}: Spark may remove executors that have subtasks, which then fetch"
            " their state elsewhere.",
            f"Remove {_CACHED_IDLE}: it is infinite by default.",
        )


def _of_encryption(conf: Mapping[str, str], place: Place) -> Iterator[Finding]:
    try:
        is_encrypted = encrypts_traffic(conf)
    except ConfigurationError as error:
        yield place.failed("encryption", error)
        return
    if is_encrypted:
        yield place.ok("encryption", "Tasks call the driver with TLS, because Spark encrypts its traffic.")
        yield from _of_weak_encryption(conf, place)
    else:
        told = {AUTHENTICATE: "authenticates, but does not encrypt", _WEB: "applies only to Spark's web pages"}
        for name in (name for name in told if is_on(conf, name)):
            yield place.warning("encryption", f"{name} {told[name]}: {_CLEAR}.", _ENCRYPT)
    if is_on(conf, _IO):
        yield place.warning(
            "encryption",
            f"{_IO} is on, but it covers Spark's own files only: the objects of the location are not encrypted, and"
            " operators refuse to start unless their options accept plain local copies of state on the executors'"
            " disks.",
            "Set Options(plain_local_files=True), and encrypt the disks of the executors and the location.",
        )
    elif not any(is_on(conf, name) for name in (RPC_SSL, AES, SASL, AUTHENTICATE, _WEB)):
        yield place.ok("encryption", "No setting asks for encryption.")


def _of_weak_encryption(conf: Mapping[str, str], place: Place) -> Iterator[Finding]:
    """Ways in which an attacker who changes Spark's traffic can read it, and the secret of the calls in it."""
    if is_on(conf, RPC_SSL):
        if not any(conf.get(name) for name in _TRUST):
            yield place.warning(
                "encryption",
                f"{_TRUST[0]} is not set, so Spark accepts any certificate: anyone between driver and executors can"
                " read its traffic, and with it the secret of the tasks' calls.",
                f"Set {_TRUST[0]}.",
            )
    elif is_on(conf, AES) and not is_on(conf, SASL) and is_on(conf, _FALLBACK, default=True):
        yield place.warning(
            "encryption",
            f"{_FALLBACK} is on, so Spark continues unencrypted if a handshake is disturbed: anyone"
            " between driver and executors can read its traffic, and with it the secret of the tasks' calls.",
            f"Set {_FALLBACK} to false.",
        )


CHECK: Final = "session"

_STUCK: Final = (
    "Check the master's address, that its service is running, and that the resource manager has room for the"
    " application. A longer time limit may be enough."
)
_FAILED: Final = (
    "Spark's output above has the reason. Check the master and each setting, and that JAVA_HOME names Java 17 or later."
)
_END_S: Final = 20.0
_LONGEST: Final = 400


def make_session(
    master: str | None, conf: Mapping[str, str], place: Place, timeout_s: float
) -> tuple[SparkSession | None, list[Finding]]:
    """Make a session with these settings; without a master Spark takes that of its configuration, or ``local[*]``.

    Without a session there is a finding that says why.
    """
    made: list[SparkSession] = []

    def make() -> Findings:
        settings: dict[str, Any] = {"spark.ui.showConsoleProgress": "false", **conf}
        builder = SparkSession.builder.appName("statelog doctor").config(map=settings)
        try:
            made.append((builder.master(master) if master else builder).getOrCreate())
        except Exception as error:
            reason = " ".join(str(error).split())[:_LONGEST]
            yield place.error(CHECK, f"There is no Spark session: {type(error).__name__}: {reason}", _FAILED)

    found = run_limited([Check(CHECK, place, make, _STUCK, internals.kill_jvm)], timeout_s)
    return (None if found else made[0]), found


def stop_session(session: SparkSession, place: Place) -> None:
    """End a session with its application."""

    def stop() -> Findings:
        with suppress(Exception):
            session.stop()
        yield from ()

    run_limited([Check(CHECK, place, stop, "", internals.kill_jvm)], _END_S)
