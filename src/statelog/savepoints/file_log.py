"""Cuts the log of Spark's file source at an entry.

Entry n is the file ``n``. At regular intervals Spark writes ``n.compact`` instead, which has all entries up to n, and
then deletes the older files. Spark derives the interval from the compacted files that it finds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final

from statelog.errors import StateMissingError

_COMPACT: Final = ".compact"


def is_file_log_entry(base_name: str) -> bool:
    """Whether a file's name is one of a log's entries."""
    return base_name.removesuffix(_COMPACT).isdecimal()


def file_log_until(names: Sequence[str], end: int, read: Callable[[str], bytes], folder: str) -> dict[str, bytes]:
    """The files, by name, of a log cut after entry `end`; raises StateMissingError if entries up to it are gone.

    `names` are the files of the log, `read` reads one, and `folder` is for messages.
    """
    single = {int(name) for name in names if name.isdecimal()}
    compact = {int(name.removesuffix(_COMPACT)) for name in names if name.endswith(_COMPACT)}
    last = max((number for number in compact if number <= end), default=-1)
    if single.issuperset(range(last + 1, end + 1)):
        own = [str(number) for number in sorted(single) if number <= end]
        own += [f"{number}{_COMPACT}" for number in sorted(compact) if number <= end]
        return {name: read(name) for name in own}
    later = min((number for number in compact if number > end), default=None)
    if later is None:
        raise StateMissingError(
            f"{folder}: the log of the files that were read lacks entries up to {end}.", hint="Save a newer batch."
        )
    # From this compacted file alone Spark derives an interval that the file fits, whichever interval is configured.
    return {f"{end}{_COMPACT}": _cut(read(f"{later}{_COMPACT}").decode(), end)}


def _cut(compacted: str, end: int) -> bytes:
    """A compacted file without the entries after `end`."""
    version, *lines = compacted.split("\n")
    return "\n".join([version, *(line for line in lines if line and json.loads(line)["batchId"] <= end)]).encode()
