"""The charts of an operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from statelog.log.entry import Claim
from statelog.metrics import CheckpointMetrics, SubtaskMetrics
from statelog.shown import size_text
from statelog.tools.pages.charts import Chart, Column, Lane, Mark, Timeline, bar_chart, timeline
from statelog.tools.pages.operator_model import CheckpointRow, OperatorModel, SubtaskRow

BINS: Final = 90
"""Bars of a chart, at most."""


@dataclass(frozen=True)
class Bin:
    """Some neighbours of a series."""

    first: int
    """Their places in the series, both included."""
    last: int
    values: tuple[float | None, ...]
    """For each measure the largest one; None if there is none."""


def binned(series: Sequence[_T], measures: Sequence[Callable[[_T], float | None]], bins: int = BINS) -> list[Bin]:
    """Cut a series into at most `bins` bins of nearly equal size; each has the element with the largest sum.

    So the measures of a bin are those of one element, and may be stacked.
    """
    count = min(bins, len(series))
    found: list[Bin] = []
    for number in range(count):
        first, end = number * len(series) // count, (number + 1) * len(series) // count
        held = [tuple(measure(one) for measure in measures) for one in series[first:end]]
        found.append(Bin(first, end - 1, max(held, key=_total)))
    return found


def _total(values: Sequence[float | None]) -> tuple[bool, float]:
    known = [value for value in values if value is not None]
    return bool(known), sum(known)


WIDE: Final = 1140
NARROW: Final = 380

_T = TypeVar("_T")


def operator_charts(one: OperatorModel) -> list[Chart]:
    """The charts over the checkpoints, and over the batches of a running query."""
    rows = one.checkpoints
    if not rows:
        return []
    charts = [*_duration_charts(one.metrics)]
    charts.append(
        bar_chart(
            "State",
            _columns(rows, _batch, [lambda row: row.sizes.base_bytes, lambda row: row.sizes.log_bytes]),
            bytes_text,
            note=_note(rows),
            legend=("materialized", "changes since"),
        )
    )
    charts.append(
        bar_chart(
            "Changes of a batch", _columns(rows, _batch, [lambda row: row.changed_bytes]), bytes_text, note=_note(rows)
        )
    )
    charts.append(
        bar_chart(
            "Input rows of a batch",
            _columns(rows, _batch, [lambda row: row.input_rows]),
            count_text,
            note=_note(rows),
            is_whole=True,
        )
    )
    charts.append(
        bar_chart(
            "Time between batches",
            _columns(rows, _batch, [lambda row: None if row.interval_ms is None else row.interval_ms / 1000]),
            seconds_text,
            note=_note(rows),
        )
    )
    charts.append(
        bar_chart(
            "Files of a checkpoint",
            _columns(rows, _batch, [lambda row: row.sizes.files]),
            count_text,
            note=_note(rows),
            is_line=True,
            is_whole=True,
        )
    )
    # The log tells it as long as it has all that was retained then; a running query's driver has measured it.
    charts.append(
        bar_chart(
            "Space amplification" if one.metrics else "Storage overhead",
            _columns(one.metrics, lambda one: str(one.batch), [lambda one: one.space_amplification])
            if one.metrics
            else _columns(rows, _batch, [lambda row: row.sizes.storage_overhead]),
            ratio_text,
            note="size of the files per byte that is needed"
            if one.metrics
            else "what retained checkpoints need, per byte of the newest",
            is_line=True,
        )
    )
    return [chart for chart in charts if chart.bars or chart.lines]


_TIMES: Final[dict[str, Callable[[SubtaskMetrics], float]]] = {
    "reading state": lambda subtask: subtask.restore_s + subtask.read_s,
    "processor": lambda subtask: subtask.processor_s,
    "encoding": lambda subtask: subtask.encode_s,
    "uploading": lambda subtask: subtask.upload_s,
    "waiting": lambda subtask: subtask.wait_s,
}


def subtask_charts(one: OperatorModel) -> list[Chart]:
    """The charts over the subtasks."""
    if not one.subtasks:
        return []
    newest = None if one.live is None else one.live.newest
    times = (
        []
        if newest is None
        else [
            bar_chart(
                f"Time in batch {newest.batch}",
                _columns(newest.subtasks, lambda subtask: str(subtask.subtask), list(_TIMES.values())),
                seconds_text,
                legend=list(_TIMES),
            )
        ]
    )
    note = (
        "" if len(one.subtasks) <= BINS else f"the largest of up to {math.ceil(len(one.subtasks) / BINS)} subtasks each"
    )
    return [
        *times,
        bar_chart("State", _columns(one.subtasks, _subtask, [lambda row: row.state_bytes]), bytes_text, note=note),
        bar_chart(
            f"Input rows, {_batches(one.recent)}",
            _columns(one.subtasks, _subtask, [lambda row: row.input_rows]),
            count_text,
            note=note,
            is_whole=True,
        ),
        bar_chart(
            f"Changes, {_batches(one.recent)}",
            _columns(one.subtasks, _subtask, [lambda row: row.changed_bytes]),
            bytes_text,
            note=note,
        ),
    ]


def restore_chart(one: OperatorModel) -> Chart | None:
    """How far the subtasks are that restore their state now."""
    restoring = None if one.live is None else one.live.restoring
    if restoring is None:
        return None
    return bar_chart(
        "Restored by subtask",
        _columns(
            restoring.subtasks,
            lambda row: str(row.subtask),
            [lambda row: row.read_bytes, lambda row: row.known_bytes - row.read_bytes],
        ),
        bytes_text,
        legend=("read", "to be read"),
    )


def operator_timelines(one: OperatorModel) -> list[Timeline]:
    """The timeline in two widths; none without a checkpoint."""
    if not one.checkpoints:
        return []
    lanes = [
        Lane("Checkpoints", 1, tuple(Mark(row.time_ms, row.time_ms, f"batch {row.batch}") for row in one.checkpoints)),
        Lane("Retained", 2, _retained(one.checkpoints)),
        Lane(
            "Materialized",
            3,
            tuple(
                Mark(row.time_ms, row.time_ms, f"batch {row.batch}: {row.materialized} subtasks")
                for row in one.checkpoints
                if row.materialized
            ),
        ),
        Lane("Pinned", 4, tuple(Mark(pin.batch_time_ms, pin.batch_time_ms, f"batch {pin.batch}") for pin in one.pins)),
        Lane("Starts", 5, tuple(Mark(start.time_ms, start.time_ms, f"start {start.epoch}") for start in _starts(one))),
    ]
    return [drawn for width in (WIDE, NARROW) if (drawn := timeline(lanes, width)) is not None]


def _starts(one: OperatorModel) -> list[Claim]:
    """The starts near the checkpoints, whose times are those of Spark's clock."""
    first, last = one.checkpoints[0].time_ms, one.checkpoints[-1].time_ms
    margin = max(last - first, 60_000)
    return [start for start in one.starts if first - margin <= start.time_ms <= last + margin]


def _retained(rows: Sequence[CheckpointRow]) -> tuple[Mark, ...]:
    held = [row for row in rows if row.is_retained]
    if not held:
        return ()
    return (Mark(held[0].time_ms, held[-1].time_ms, f"batches {held[0].batch} to {held[-1].batch}"),)


def _duration_charts(metrics: Sequence[CheckpointMetrics]) -> list[Chart]:
    if not metrics:
        return []
    return [
        bar_chart(
            "Duration of a checkpoint",
            _columns(
                metrics,
                lambda one: str(one.batch),
                [lambda one: one.restore_s, lambda one: one.subtask_s, lambda one: one.commit_s],
            ),
            seconds_text,
            note="the slowest subtask, as measured by the driver",
            legend=("read state", "store changes", "commit"),
        )
    ]


def _columns(
    rows: Sequence[_T], name: Callable[[_T], str], measures: Sequence[Callable[[_T], float | None]]
) -> list[Column]:
    columns: list[Column] = []
    for one in binned(rows, measures):
        first, last = name(rows[one.first]), name(rows[one.last])
        columns.append(Column(first if first == last else f"{first} to {last}", one.values))
    return columns


def _note(rows: Sequence[CheckpointRow]) -> str:
    return "" if len(rows) <= BINS else f"the largest of up to {math.ceil(len(rows) / BINS):,} batches each"


def _batches(count: int) -> str:
    return "1 batch" if count == 1 else f"latest {count} batches"


def _batch(row: CheckpointRow) -> str:
    return str(row.batch)


def _subtask(row: SubtaskRow) -> str:
    return str(row.subtask)


def bytes_text(value: float) -> str:
    """A size, without needless digits."""
    return size_text(round(value)).replace(".0 ", " ")


def count_text(value: float) -> str:
    """A number, short."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:,.10g}"


def seconds_text(value: float) -> str:
    """A duration."""
    if value >= 7200:
        return f"{value / 3600:.3g} h"
    if value >= 120:
        return f"{value / 60:.3g} min"
    if value >= 1 or not value:
        return f"{value:.3g} s"
    return f"{value * 1000:.3g} ms"


def ratio_text(value: float) -> str:
    """A ratio."""
    return f"{value:.3g}x"
