"""The session that the command makes for a diagnosis, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from pyspark.sql import SparkSession

from statelog.diagnosis.finding import Finding, Place
from statelog.diagnosis.limited import Check, Findings, run_limited
from statelog.spark import internals

CHECK: Final = "session"

_STUCK: Final = (
    "Is the master's address right and its service running? Does the resource manager have room for the application? A"
    " longer time limit waits longer."
)
_FAILED: Final = (
    "The lines above from Spark have the reason. Is the master right, and each setting? Does JAVA_HOME name Java 17 or"
    " later?"
)
_END_S: Final = 20.0
_LONGEST: Final = 400


def make_session(
    master: str | None, conf: Mapping[str, str], place: Place, timeout_s: float
) -> tuple[SparkSession | None, list[Finding]]:
    """Make a session with these settings; without a master Spark takes that of its configuration, or ``local[*]``.

    Without a session there is a finding that tells why.
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
