"""Opens the store of a location and the log in it, as the options say."""

from __future__ import annotations

from functools import partial
from typing import Final

from statelog.clock import Clock, SystemClock
from statelog.errors import ConfigurationError
from statelog.log import references
from statelog.log.numbered import NumberedLog
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.storage import LocalStore, Store, open_store
from statelog.storage.links import LinkedStore
from statelog.storage.names import name_part
from statelog.storage.retry import RetryingStore, RetryPolicy

STATE_FOLDER: Final = "statelog"
"""The location of a query's state in its checkpointLocation, unless the query has another one."""
LOG_FOLDER: Final = references.LOG_FOLDER
PINS_FOLDER: Final = references.PINS_FOLDER
"""The folders of a query, in its location; next to them, each operator has one, named after its identity."""
CHANGES_FOLDER: Final = references.CHANGES_FOLDER
RUNS_FOLDER: Final = references.RUNS_FOLDER
INITIAL_FOLDER: Final = references.INITIAL_FOLDER
"""The folders of an operator, in its own."""
_IDENTITY_TOKEN_BYTES: Final = 8


def new_identity(uid: str, token: bytes) -> str:
    """An identity for an operator whose state begins; `token` is unique."""
    return f"{name_part(uid)}-{token[-_IDENTITY_TOKEN_BYTES:].hex()}"


def open_log(store: Store, options: Options, clock: Clock, *, remembers: bool = False) -> NumberedLog:
    """Make the log of the query whose location is the store; nothing is written yet. `remembers` is for readers.

    Raises ConfigurationError if files are to be merged across checkpoints and the store cannot append.
    """
    merging = options.file_merging
    if merging == "across" and not store.can_append:
        raise ConfigurationError(
            f"{store} cannot append, so the files of several checkpoints cannot be merged.",
            hint="Use file_merging='within', or 'auto', which merges across checkpoints where the store can append.",
        )
    return NumberedLog(
        store,
        LOG_FOLDER,
        clock,
        appends=store.can_append if merging == "auto" else merging == "across",
        max_file_bytes=options.tuning.max_file_bytes,
        min_age_s=options.tuning.log_min_age_s,
        remembers=remembers,
    )


def open_retrying_store(location: str, options: Options, clock: Clock, recorder: Measurements) -> LinkedStore:
    """Make the store of a location, which also reads links; nothing is opened yet."""
    return LinkedStore(
        _open_own(location, options, clock, recorder),
        partial(_open_own, options=options, clock=clock, recorder=recorder),
    )


def _open_own(location: str, options: Options, clock: Clock, recorder: Measurements) -> Store:
    """The store of a location, without links."""
    store = open_store(location)
    if isinstance(store, LocalStore):
        return store  # the operating system repeats whatever can be repeated
    if options.tuning.upload_attempts == 1:
        policy = RetryPolicy.none()
    else:
        policy = RetryPolicy(
            options.tuning.upload_attempts, options.tuning.upload_timeout_s, options.tuning.upload_retry_delay_s
        )
    return RetryingStore(store, policy, clock=clock, recorder=recorder)


def open_location(location: str) -> LinkedStore:
    """Make the store of a location with the default options, outside of a running query."""
    return open_retrying_store(location, Options(), SystemClock(), Measurements())
