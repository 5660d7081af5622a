"""Opens a query's checkpointLocation: Spark's files in it, and the log of its state."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from statelog.errors import ConfigurationError, ErrorKind
from statelog.log.open import STATE_FOLDER, open_location
from statelog.savepoints.spark_checkpoint import SparkCheckpoint
from statelog.savepoints.spark_files import DirectoryFiles, StoreFiles
from statelog.savepoints.stopped import StoppedQuery
from statelog.spark import internals
from statelog.spark.hadoop_files import HadoopFiles
from statelog.storage.location import OBJECT_STORES, scheme_of
from statelog.storage.open import REGISTERED, local_path

_LOCAL: Final = ("", "file")


def open_checkpoint(location: str, session: SparkSession | None) -> SparkCheckpoint:
    """Open the Spark side of a checkpointLocation.

    A directory is read and written here, which syncs its files. Any other place is reached as Spark reaches it, through
    the session's Hadoop; a bucket also without, as a location of statelog's. Raises ConfigurationError if the place can
    be reached in neither way.
    """
    given = scheme_of(location)
    scheme = given if session is None or given == "file" else internals.file_system_scheme(session, location)
    if session is not None and scheme not in _LOCAL:
        files = HadoopFiles(session, location)
        return SparkCheckpoint(files, files.location)
    if given in OBJECT_STORES:
        return SparkCheckpoint(StoreFiles(open_location(location)), location.rstrip("/"))
    if given not in _LOCAL:
        reason = "no Spark session is active" if session is None else "the session's Hadoop does not know it"
        raise ConfigurationError(
            f"The checkpointLocation {location} is of the scheme {given}, and {reason}.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint=f"Call statelog in an application whose Spark session reads and writes {given}:// itself.",
        )
    path = Path(local_path(location))
    return SparkCheckpoint(DirectoryFiles(open_location(str(path)), path), str(path))


def state_location(checkpoint: SparkCheckpoint, location: str | None) -> str:
    """The place for state below a checkpointLocation, or `location` if no store of statelog's can be there.

    Raises ConfigurationError if that is None.
    """
    if location is not None and not _has_store(checkpoint.location):
        return location
    return state_home(checkpoint.location)


def state_home(checkpoint_location: str) -> str:
    """The place for state below a checkpointLocation; ConfigurationError if no store of statelog's can be there."""
    if not _has_store(checkpoint_location):
        scheme = scheme_of(checkpoint_location)
        raise ConfigurationError(
            f"{checkpoint_location}: statelog keeps no state in a place of the scheme {scheme}.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Pass location=, the directory or bucket of the operators' state.",
        )
    return f"{checkpoint_location.rstrip('/')}/{STATE_FOLDER}"


def _has_store(location: str) -> bool:
    scheme = scheme_of(location)
    return scheme in _LOCAL or scheme in OBJECT_STORES or scheme in REGISTERED


def read_query(checkpoint: SparkCheckpoint, location: str | None) -> StoppedQuery:
    """Read a query's log, at `location` or below its checkpointLocation.

    Raises ConfigurationError if the location is no checkpoint, CorruptionError or StorageError if the log cannot be
    read.
    """
    place = location or state_location(checkpoint, None)
    return StoppedQuery.open(checkpoint, open_location(place), place)
