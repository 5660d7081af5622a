"""Finds orphans: stored objects that crashed starts have left behind."""

from __future__ import annotations

from collections.abc import Collection

from statelog.checkpoint.history import History
from statelog.clock import Clock
from statelog.storage import Store

CHANGES_FOLDER = "changes"
RUNS_FOLDER = "runs"
INITIAL_FOLDER = "initial"
"""Rows of an initial state, in a folder per start, until the start's first batch is over."""


def find_orphans(
    store: Store,
    root: str,
    history: History,
    *,
    epoch: int,
    run_id: str,
    fenced_runs: Collection[str] = (),
    min_age_s: float,
    clock: Clock,
) -> list[str]:
    """Objects of an operator that no checkpoint references and no live start can still reference, sorted.

    Looks only below `root`, the operator's folder. `epoch` was just claimed: writers of older epochs are fenced, so
    objects that they wrote since the last entry can never be referenced. `run_id` is the start whose initial state may
    still be needed. Objects younger than `min_age_s` stay, because a start without a claim in the log may be about to
    claim. The initial state of `fenced_runs` goes at any age.
    """
    referenced = history.object_names()
    initial, own = (f"{root}/{folder}/" for folder in (INITIAL_FOLDER, f"{INITIAL_FOLDER}/{run_id}"))
    found = [
        info
        for folder in (f"{root}/{CHANGES_FOLDER}/", f"{root}/{RUNS_FOLDER}/")
        for info in store.list(folder)
        if info.name not in referenced and _epoch_of(info.name, folder) < epoch
    ]
    found += [info for info in store.list(initial) if not info.name.startswith(own)]
    fenced = tuple(f"{initial}{run}/" for run in fenced_runs)
    now_s = clock.now_s()
    return sorted(info.name for info in found if info.name.startswith(fenced) or now_s - info.modified_s >= min_age_s)


def _epoch_of(name: str, prefix: str) -> int:
    folder = name.removeprefix(prefix).partition("/")[0]
    return int(folder) if folder.isdecimal() else 0
