"""Which form a log has: that of the log that is there, else what the store can do."""

from __future__ import annotations

from typing import Final

from statelog.checkpoint.append_log import EPOCH_FILE, AppendLog
from statelog.checkpoint.log import Log
from statelog.checkpoint.object_log import ENTRY_OBJECT, ObjectLog
from statelog.errors import ConfigurationError
from statelog.storage.store import Store

__all__ = ["open_log"]

_OBJECT_NAMES: Final = {"append": EPOCH_FILE, "object": ENTRY_OBJECT}


def open_log(store: Store, prefix: str, form: str = "auto") -> Log:
    """Make the log in a folder; nothing is written yet.

    Parameters
    ----------
    store : Store
        Where the log is or will be.
    prefix : str
        The log's folder.
    form : str
        ``append`` for one file per epoch, ``object`` for one object per entry; ``auto`` for the form of
        the log that is there, or else ``append`` if the store can append.

    Raises
    ------
    ConfigurationError
        If `form` is unknown, if the log that is there has the other form, or if the store cannot append.
    """
    if form not in ("append", "auto", "object"):
        raise ConfigurationError(f"There is no log form {form!r}.", hint="Use 'append', 'object' or 'auto'.")
    names = [info.name[len(prefix) + 1 :] for info in store.list(f"{prefix}/")]
    existing = [key for key, pattern in _OBJECT_NAMES.items() if any(map(pattern.fullmatch, names))]
    if len(existing) > 1:
        raise ConfigurationError(
            f"{store!r}: the folder {prefix} holds two logs, of different forms.",
            hint="Remove the one that is not the query's, or use another location.",
        )
    if existing and form not in ("auto", existing[0]):
        raise ConfigurationError(
            f"{store!r}: the log {prefix} has the form {existing[0]!r}, not {form!r}.",
            hint=f"Use the form {existing[0]!r} or 'auto', or another location.",
        )
    chosen = existing[0] if existing else form
    if chosen == "auto":
        chosen = "append" if store.can_append else "object"
    if chosen == "object":
        return ObjectLog(store, prefix)
    if not store.can_append:
        raise ConfigurationError(
            f"{store!r} cannot append, which the log {prefix} of the form 'append' needs.",
            hint="Use the form 'object', or the store that the log was written on.",
        )
    return AppendLog(store, prefix)
