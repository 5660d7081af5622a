"""The forms of the names that stored documents hold: each kind of name leads to one place, and to nothing beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from statelog.errors import CorruptionError, ErrorKind
from statelog.storage.links import is_link, split_link
from statelog.storage.names import PLAIN_PART as _PART

LOG_FOLDER: Final = "log"
PINS_FOLDER: Final = "pins"
CHANGES_FOLDER: Final = "changes"
RUNS_FOLDER: Final = "runs"
INITIAL_FOLDER: Final = "initial"

_IDENTITY: Final = re.compile(_PART)
_OBJECT: Final = re.compile(
    rf"{_PART}/(?:{CHANGES_FOLDER}|{RUNS_FOLDER}|{INITIAL_FOLDER})(?:/{_PART})+|{LOG_FOLDER}/\d{{20}}\.log"
)
_PIN: Final = re.compile(rf"{PINS_FOLDER}/\d{{20}}-[0-9a-f]+\.json")


def is_pin(name: str) -> bool:
    """Whether a name is one that only pins have."""
    return _PIN.fullmatch(name) is not None


def require_identities(identities: Iterable[str], where: str) -> None:
    """Raise CorruptionError unless all are names of a single folder; `where` is the document in messages."""
    for identity in identities:
        if identity in (LOG_FOLDER, PINS_FOLDER) or not _IDENTITY.fullmatch(identity):
            raise _forged(where, f"{identity!r:.200} is no identity of an operator")


def require_objects(names: Iterable[str], where: str) -> None:
    """Raise CorruptionError unless all are names of objects that operators and logs have, or links to such."""
    for name in names:
        own = split_link(name)[1] if is_link(name) else name
        if not _OBJECT.fullmatch(own):
            raise _forged(where, f"{name!r:.200} is no name of an operator's object")


def _forged(where: str, reason: str) -> CorruptionError:
    return CorruptionError(
        f"{where}: {reason}.",
        kind=ErrorKind.FORMAT,
        hint="Only another program can have written it. Restore the file from a copy, and see who may write there.",
    )
