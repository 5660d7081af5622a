"""Removing what crashed runs left behind."""

from __future__ import annotations

from statelog.checkpoint.history import History
from statelog.clock import Clock
from statelog.storage import Store

__all__ = ["CHANGES_FOLDER", "find_orphans"]

CHANGES_FOLDER = "changes"


def find_orphans(store: Store, root: str, history: History, *, epoch: int, min_age_s: float, clock: Clock) -> list[str]:
    """Objects of an operator that no checkpoint references and no live run can still reference.

    Parameters
    ----------
    store : Store
        The store.
    root : str
        The operator's own folder; nothing outside it is looked at.
    history : History
        The checkpoints that can be restored.
    epoch : int
        The epoch that was just claimed. Writers of older epochs are fenced, so what they wrote since the
        last entry can never be referenced.
    min_age_s : float
        Younger objects are left alone.
    clock : Clock
        Tells the age.

    Returns
    -------
    list of str
        Names, sorted.
    """
    referenced = history.object_names()
    prefix = f"{root}/{CHANGES_FOLDER}/"
    now_s = clock.now_s()
    return [
        info.name
        for info in store.list(prefix)
        if info.name not in referenced and now_s - info.modified_s >= min_age_s and _epoch_of(info.name, prefix) < epoch
    ]


def _epoch_of(name: str, prefix: str) -> int:
    folder = name.removeprefix(prefix).partition("/")[0]
    return int(folder) if folder.isdecimal() else 0
