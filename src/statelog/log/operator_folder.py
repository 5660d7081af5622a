"""Finds the folder of an operator's state in a location."""

from __future__ import annotations

from typing import Final

from statelog.clock import SystemClock
from statelog.log.entry import Checkpoint, Claim
from statelog.log.open import LOG_FOLDER, open_log
from statelog.options import Options
from statelog.storage import Store
from statelog.storage.names import former_name_part, name_part

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
