"""Checks of a user's arguments and session."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from collections.abc import Iterable

from pyspark.sql import SparkSession

from statelog.errors import ConfigurationError, ConfigurationWarning, ErrorKind
from statelog.numbers import checked_whole
from statelog.options import Options
from statelog.runs.key_groups import KEY_GROUPS
from statelog.runs.schema import StateLife
from statelog.spark.driver import internals
from statelog.spark.driver.interpreter import check_interpreter
from statelog.spark.plan.states import KeyedStateDeclaration
from statelog.storage import open_store
from statelog.storage.open import absolute

_DEFAULT_UID = "main"
_OUTPUT_MODES = ("append", "update", "complete")

_instances = itertools.count()


def check_output_mode(mode: object) -> None:
    """Refuse anything but Spark's output modes."""
    if str(mode).lower() not in _OUTPUT_MODES:
        raise ConfigurationError(f"outputMode is {mode!r}.", hint="It must be 'append', 'update' or 'complete'.")


def require_classic(session: SparkSession) -> None:
    """Refuse Spark Connect."""
    if not internals.is_classic(session):
        raise ConfigurationError(
            "statelog does not run on Spark Connect.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Use a classic session: run the program in the driver (spark-submit, a job, spark.api.mode=classic),"
            " with SparkSession.builder and without remote().",
        )


def check_session(session: SparkSession) -> None:
    """Refuse Spark Connect, speculation, and Python workers that cannot run tasks."""
    require_classic(session)
    if str(session.sparkContext.getConf().get("spark.speculation", "false")).lower() == "true":
        raise ConfigurationError(
            "spark.speculation is on: a second attempt may run beside the first, and either may become the result.",
            kind=ErrorKind.UNSUPPORTED_SETTING,
            hint="Set spark.speculation to false for applications with stateful operators.",
        )
    check_interpreter(session)


def check_encryption(session: SparkSession, options: Options) -> None:
    """Refuse an application whose local files are to be encrypted, unless its user accepts plain ones."""
    name = "spark.io.encryption.enabled"
    if str(session.sparkContext.getConf().get(name, "false")).lower() == "true" and not options.plain_local_files:
        raise ConfigurationError(
            f"{name} is on, but statelog keeps plain copies of state in the local directories of executors.",
            kind=ErrorKind.UNSUPPORTED_SETTING,
            hint="Set Options(plain_local_files=True) to accept that, for example on encrypted disks, and perhaps"
            " Options(local_directory=...).",
        )


def warn_of_no_watermark(uid: str) -> None:
    """Warn that an operator's event time never advances, because its input has no watermark."""
    _warn(
        f"operator '{uid}': timeMode is 'EventTime', but its input has no watermark: timers and TTL in event time"
        " will never be due. Call withWatermark(...) on the stream, or pass watermark=statelog.Watermark(...)."
    )


def warn_of_deleted(uid: str, states: Iterable[KeyedStateDeclaration]) -> None:
    """Warn of states that ``init`` both declares and deletes, in either order."""
    effects = {
        StateLife.BATCH: "deletes and then declares: they are empty at the start of every batch",
        StateLife.NONE: "declares and then deletes: their values are gone, and reading and writing them fails",
    }
    for life, effect in effects.items():
        names = [state.name for state in states if state.life is life]
        if names:
            _warn(
                f"operator '{uid}': there are states that init() {effect} ({', '.join(names)}). Delete a state in one"
                " version of the processor, and declare it in a later one."
            )


def _warn(text: str) -> None:
    """Warn with the line of the user's code that called statelog."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("statelog."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, ConfigurationWarning, stacklevel=level)


def new_instance() -> str:
    """Make an id that no other operator of the driver's program has."""
    return f"{os.getpid()}-{next(_instances)}"


def checked_uid(uid: str | None) -> str:
    """The operator's name; the default name for None."""
    if uid is not None and (not isinstance(uid, str) or not uid or len(uid) > 200):
        raise ConfigurationError(f"uid is {uid!r}.", hint="It must be a string of 1 to 200 characters.")
    return _DEFAULT_UID if uid is None else uid


def checked_location(location: object) -> str | None:
    """The location in a form that means the same on all hosts: a relative path becomes absolute, on the driver."""
    if location is None:
        return None
    if not isinstance(location, (str, os.PathLike)) or not (text := str(location)).strip():
        raise ConfigurationError(f"location is {location!r}.", hint="It must be a path or a URL (s3://bucket/folder).")
    open_store(text)
    return absolute(text)


def check_options(options: object) -> None:
    """Refuse anything but Options."""
    if not isinstance(options, Options):
        raise ConfigurationError(f"options is {options!r:.80}.", hint="Pass statelog.Options(...).")


def checked_parallelism(parallelism: int | None, session: SparkSession) -> int:
    """The number of subtasks; by default the application's number of cores, but not more than there are key groups."""
    if parallelism is None:
        return min(max(session.sparkContext.defaultParallelism, 1), KEY_GROUPS)
    return checked_whole(parallelism, "parallelism", 1, KEY_GROUPS)


def is_ansi(session: SparkSession) -> bool:
    """Whether a session is in ANSI mode, where a sum that does not fit its type is an error."""
    return str(session.conf.get("spark.sql.ansi.enabled")).lower() == "true"


def is_case_sensitive(session: SparkSession) -> bool:
    """Whether a session distinguishes names of columns by case."""
    return str(session.conf.get("spark.sql.caseSensitive")).lower() == "true"
