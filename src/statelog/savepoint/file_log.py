"""The log of Spark's file source, as it was when it had come to an entry.

Entry n is the file ``n``; every so many entries there is ``n.compact`` instead, with all entries up to n, after which
the older files are deleted. Spark finds the interval from the compacted files that are there.
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
    """The files of a log that tells of what was read up to an entry, and of nothing later.

    Parameters
    ----------
    names : sequence of str
        Its files' names.
    end : int
        The last entry that counts.
    read : callable
        Reads a file.
    folder : str
        Where it is, for messages.

    Raises
    ------
    StateMissingError
        If entries are gone.
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
    # With this one compacted file alone Spark finds an interval that it fits, whichever is configured.
    return {f"{end}{_COMPACT}": _cut(read(f"{later}{_COMPACT}").decode(), end)}


def _cut(compacted: str, end: int) -> bytes:
    """A compacted file's text without the entries behind one."""
    version, *lines = compacted.split("\n")
    return "\n".join([version, *(line for line in lines if line and json.loads(line)["batchId"] <= end)]).encode()
