"""What is made of the batches of a side, and of two sides that ran in the same rounds."""

from __future__ import annotations

import statistics
from itertools import chain
from typing import Any

from benchmarks.distribution import Distribution

__all__ = ["batch_figures", "checkpoint_figures", "ratio", "shown"]

_FILES = ("files_live", "bytes_live", "files_seen", "bytes_seen")


def batch_figures(rounds: list[dict[str, Any]], rows_per_batch: int, warm_up: int) -> dict[str, Any]:
    """Figures of a side: per round the rate, over all rounds the durations.

    Parameters
    ----------
    rounds : list of dict
        What :meth:`benchmarks.streaming.QueryRun.to_json` returned, by round.
    rows_per_batch : int
        Input rows of a batch.
    warm_up : int
        How many batches to leave out of each round.
    """
    batches_ms = [
        [batch["triggerExecution"] for batch in one["batches"] if batch["batch"] >= warm_up] for one in rounds
    ]
    rates = [rows_per_batch * 1000 / statistics.median(durations) for durations in batches_ms]
    return {
        "rows_per_batch": rows_per_batch,
        "batches_left_out": warm_up,
        "rows_per_s": statistics.median(rates),
        "rows_per_s_by_round": rates,
        "batch_ms": Distribution.of(chain.from_iterable(batches_ms)).to_json(),
        **{name: rounds[-1][name] for name in _FILES},
        "by_round": rounds,
    }


def checkpoint_figures(rounds: list[dict[str, Any]], parallelism: int, warm_up: int) -> dict[str, Any]:
    """Figures of a side's checkpoints; empty if it has none.

    Parameters
    ----------
    rounds : list of dict
        As for :func:`batch_figures`.
    parallelism : int
        Number of subtasks.
    warm_up : int
        How many batches to leave out of each round.
    """
    taken = [each for one in rounds for each in one["checkpoints"] if each["batch"] >= warm_up]
    if not taken:
        return {}
    figures: dict[str, Any] = {
        "changed_keys_per_subtask": statistics.median(each["changes"] / parallelism for each in taken),
        "changed_bytes_per_subtask": statistics.median(each["changed_bytes"] / parallelism for each in taken),
    }
    for name, parts in (
        ("subtask_ms", ("subtask_s",)),
        ("commit_ms", ("commit_s",)),
        ("checkpoint_ms", ("subtask_s", "commit_s")),
    ):
        figures[name] = Distribution.of(1000 * sum(each[part] for part in parts) for each in taken).to_json()
    return figures


def ratio(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The rate of a side divided by that of another: the median of the ratios of the rounds."""
    pairs = zip(one["rows_per_s_by_round"], other["rows_per_s_by_round"], strict=True)
    return statistics.median(float(first) / float(second) for first, second in pairs)


def shown(durations: dict[str, Any] | None) -> str:
    """Durations as a cell of a table."""
    if durations is None:
        return ""
    percentiles = [f"{name} {value:.1f}" for name, value in durations.items() if name.startswith("p")]
    return ", ".join([f"{durations['median']:.1f}", *percentiles, f"max {durations['max']:.1f}"])
