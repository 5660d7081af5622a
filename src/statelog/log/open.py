"""Makes the log of an operator, as the options say."""

from __future__ import annotations

from statelog.clock import Clock
from statelog.errors import ConfigurationError
from statelog.log.log import Log
from statelog.log.numbered import NumberedLog
from statelog.options import Options
from statelog.storage.store import Store

LOG_FOLDER = "log"


def open_log(store: Store, root: str, options: Options, clock: Clock) -> Log:
    """Make the log of the operator whose folder is `root`; nothing is written yet.

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
    )
