"""Opens the store of a location, the folder of an operator in it, and its log, as the options say."""

from __future__ import annotations

from functools import partial
from typing import Final

from statelog.clock import Clock, SystemClock
from statelog.errors import ConfigurationError
from statelog.log.entry import Checkpoint, Claim
from statelog.log.numbered import NumberedLog
from statelog.metrics import Measurements
from statelog.options import Options
from statelog.storage import LocalStore, Store, open_store
from statelog.storage.links import LinkedStore
from statelog.storage.names import former_name_part, name_part
from statelog.storage.retry import RetryingStore, RetryPolicy

STATE_FOLDER: Final = "statelog"
"""The location of a query's operators in its checkpointLocation, unless they are given another."""
LOG_FOLDER = "log"
CHANGES_FOLDER = "changes"
RUNS_FOLDER = "runs"
INITIAL_FOLDER = "initial"
"""The folders of an operator, in its own."""


def open_log(store: Store, root: str, options: Options, clock: Clock, *, remembers: bool = False) -> NumberedLog:
    """Make the log of the operator whose folder is `root`; nothing is written yet. `remembers` is for readers.

    Raises ConfigurationError if files are to be merged across checkpoints and the store cannot append.
    """
    merging = options.file_merging
    if merging == "across" and not store.can_append:
        raise ConfigurationError(
            f"{store!r} cannot append, so the files of several checkpoints cannot be merged.",
            hint="Use file_merging='within', or 'auto', which merges across checkpoints where the store can append.",
        )
    return NumberedLog(
        store,
        f"{root}/{LOG_FOLDER}",
        clock,
        appends=store.can_append if merging == "auto" else merging == "across",
        max_file_bytes=options.max_file_bytes,
        min_age_s=options.log_min_age_s,
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
    if options.upload_attempts == 1:
        policy = RetryPolicy.none()
    else:
        policy = RetryPolicy(options.upload_attempts, options.upload_timeout_s, options.upload_retry_delay_s)
    return RetryingStore(store, policy, clock=clock, recorder=recorder)


def open_location(location: str) -> LinkedStore:
    """Make the store of a location with the default options, outside of a running query."""
    return open_retrying_store(location, Options(), SystemClock(), Measurements())


_LONGEST_NAME: Final = 255


def operator_folder(store: Store, uid: str) -> str:
    """The folder of an operator, also if it was made when folders had other names.

    A folder of the former name may be another operator's, so its log is read to tell: raises CorruptionError or
    StorageError if that fails.
    """
    folder, former = name_part(uid), former_name_part(uid)
    if folder == former or store.list(f"{folder}/{LOG_FOLDER}/"):
        return folder
    # A name that a store refuses was never a folder.
    if former == "." or len(former) > _LONGEST_NAME or not store.list(f"{former}/{LOG_FOLDER}/"):
        return folder
    entries = open_log(store, former, Options(), SystemClock()).read()
    checkpoints = [entry.uid for entry in entries if isinstance(entry, Checkpoint)]
    owners = checkpoints or [entry.uid for entry in entries if isinstance(entry, Claim)]
    return former if owners[-1:] == [uid] else folder
