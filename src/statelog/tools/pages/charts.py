"""Places numbers in drawings: bars, lines, stacked bars and lanes, with axes; the template draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from statelog.shown import utc_time

WIDTH: Final = 380
HEIGHT: Final = 168
_LEFT: Final = 58
_RIGHT: Final = 8
_TOP: Final = 10
_BOTTOM: Final = 24
_PLOT_WIDTH: Final = WIDTH - _LEFT - _RIGHT
_PLOT_HEIGHT: Final = HEIGHT - _TOP - _BOTTOM
_Y_TICKS: Final = 4
_X_TICKS: Final = 4
_LANE: Final = 26
_STEPS: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Tick:
    """A mark of an axis."""

    at: float
    text: str
    anchor: str = "middle"


@dataclass(frozen=True)
class Bar:
    """A rectangle; its label is shown when the pointer is on it."""

    x: float
    y: float
    width: float
    height: float
    colour: int
    """Number of the colour in the style, from 1."""
    label: str


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    colour: int
    text: str


@dataclass(frozen=True)
class Chart:
    """A drawing with axes; lengths are in units of its own, about a pixel."""

    title: str
    note: str
    bars: tuple[Bar, ...]
    lines: tuple[tuple[int, str], ...]
    """Colour and path of each."""
    y_ticks: tuple[Tick, ...]
    x_ticks: tuple[Tick, ...]
    legend: tuple[Key, ...] = ()
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    base: int = HEIGHT - _BOTTOM
    """The x axis."""


@dataclass(frozen=True)
class Column:
    """What a chart shows at one place of its x axis."""

    text: str
    """Of the place, such as a batch."""
    values: tuple[float | None, ...]
    """Stacked; None leaves a gap."""


def bar_chart(
    title: str,
    columns: Sequence[Column],
    text: Callable[[float], str],
    *,
    note: str = "",
    legend: Sequence[str] = (),
    is_line: bool = False,
    is_whole: bool = False,
) -> Chart:
    """Stacked bars, or a line through the tops; `text` writes a value with its unit, `is_whole` values are counts."""
    tops = [sum(value for value in column.values if value is not None) for column in columns]
    steps = axis_steps(max(tops, default=0.0), is_whole=is_whole)
    highest = steps[-1]
    step = _PLOT_WIDTH / max(len(columns), 1)
    gap = 0.0 if step < 2 else min(2.0, step * 0.25)
    width = min(step - gap, 28.0)
    bars: list[Bar] = []
    points: list[tuple[float, float] | None] = []
    for place, column in enumerate(columns):
        centre = _LEFT + step * (place + 0.5)
        level = 0.0
        known = [value for value in column.values if value is not None]
        parts = " + ".join(text(value) for value in known)
        label = f"{column.text}: {parts}" + (f" = {text(sum(known))}" if len(known) > 1 else "")
        if is_line:
            points.append((centre, _y(known[0], highest)) if known else None)
            continue
        for number, value in enumerate(column.values, 1):
            if value:
                top = _y(level + value, highest)
                bars.append(
                    Bar(_round(centre - width / 2), top, _round(width), _round(_y(level, highest) - top), number, label)
                )
                level += value
    return Chart(
        title=title,
        note=note,
        bars=tuple(bars),
        lines=tuple((1, path) for path in _paths(points)),
        y_ticks=tuple(Tick(_y(value, highest), text(value)) for value in steps),
        x_ticks=_x_ticks(columns, step),
        legend=tuple(Key(number, one) for number, one in enumerate(legend, 1)),
    )


def axis_steps(largest: float, *, is_whole: bool = False) -> list[float]:
    """Round numbers from 0 to the first one that is not below `largest`, a few of them."""
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / _Y_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in _STEPS if power * one >= rough * 0.999)
    if is_whole:
        step = max(1.0, float(math.ceil(step)))
    count = math.ceil(largest / step - 1e-9)
    return [step * number for number in range(count + 1)]


def _y(value: float, highest: float) -> float:
    return _round(_TOP + _PLOT_HEIGHT * (1 - value / highest))


def _round(value: float) -> float:
    return round(value, 1)


def _paths(points: Sequence[tuple[float, float] | None]) -> list[str]:
    """A path for each stretch without a gap."""
    paths: list[list[str]] = [[]]
    for point in points:
        if point is None:
            paths.append([])
        else:
            paths[-1].append(f"{_round(point[0])} {point[1]}")
    return [f"M{' L'.join(path)}" if len(path) > 1 else f"M{path[0]} m-3 0 h6" for path in paths if path]


def _x_ticks(columns: Sequence[Column], step: float) -> tuple[Tick, ...]:
    if not columns:
        return ()
    stride = math.ceil(len(columns) / _X_TICKS)
    if len(columns) <= 12:
        places = list(range(0, len(columns), stride))
    else:
        places = [round(number * (len(columns) - 1) / (_X_TICKS - 1)) for number in range(_X_TICKS)]
    ticks: list[Tick] = []
    for place in places:
        is_edge = len(columns) > 12
        anchor = "start" if is_edge and place == 0 else "end" if is_edge and place == len(columns) - 1 else "middle"
        shift = 0.0 if anchor == "start" else 1.0 if anchor == "end" else 0.5
        ticks.append(Tick(_round(_LEFT + step * (place + shift)), columns[place].text.partition(" ")[0], anchor))
    return tuple(ticks)


@dataclass(frozen=True)
class Mark:
    """An event or a stretch of time in a lane."""

    from_ms: int
    to_ms: int
    label: str


@dataclass(frozen=True)
class Lane:
    """A row of a timeline."""

    name: str
    colour: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class DrawnLane:
    """A lane with its place."""

    name: str
    y: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Timeline:
    """Lanes over a common time."""

    width: int
    height: int
    left: int
    right: int
    base: int
    lanes: tuple[DrawnLane, ...]
    ticks: tuple[Tick, ...]


def timeline(lanes: Sequence[Lane], width: int) -> Timeline | None:
    """Draw lanes in `width` units; marks that would fall on one another are one. None without any mark."""
    times = [time for lane in lanes for mark in lane.marks for time in (mark.from_ms, mark.to_ms)]
    if not times:
        return None
    left, right = 112, width - 10
    first, last = min(times), max(times)
    span = max(last - first, 1)

    def at(time_ms: int) -> float:
        return left + 4 + (right - left - 8) * (time_ms - first) / span if last > first else (left + right) / 2

    drawn: list[DrawnLane] = []
    for number, lane in enumerate(lanes):
        y = 8 + _LANE * number
        drawn.append(DrawnLane(lane.name, y + _LANE / 2, tuple(_lane_bars(lane, at, y))))
    base = 8 + _LANE * len(lanes) + 4
    return Timeline(width, base + 24, left, right, base, tuple(drawn), _time_ticks(first, last, at, width))


def _lane_bars(lane: Lane, at: Callable[[int], float], y: float) -> list[Bar]:
    groups: list[list[Mark]] = []
    ends: list[float] = []
    starts: list[float] = []
    for mark in sorted(lane.marks, key=lambda one: one.from_ms):
        start, end = at(mark.from_ms), at(mark.to_ms)
        if groups and start - ends[-1] < 3:
            groups[-1].append(mark)
            ends[-1] = max(ends[-1], end)
        elif groups and start - starts[-1] < 3:
            groups[-1].append(mark)
        else:
            groups.append([mark])
            starts.append(start)
            ends.append(end)
    return [
        Bar(_round(start - 1), y + 6, _round(max(end - start, 0) + 2), _LANE - 12, lane.colour, _label(group))
        for group, start, end in zip(groups, starts, ends, strict=True)
    ]


def _label(marks: Sequence[Mark]) -> str:
    if len(marks) == 1:
        return marks[0].label
    return f"{marks[0].label} to {marks[-1].label} ({len(marks):,})"


def _time_ticks(first: int, last: int, at: Callable[[int], float], width: int) -> tuple[Tick, ...]:
    if first == last:
        return (Tick(_round(at(first)), _time_text(first, 0)),)
    count = max(2, width // 190)
    ticks: list[Tick] = []
    for number in range(count):
        time_ms = first + (last - first) * number // (count - 1)
        anchor = "start" if not number else "end" if number == count - 1 else "middle"
        ticks.append(Tick(_round(at(time_ms)), _time_text(time_ms, last - first), anchor))
    return tuple(ticks)


def _time_text(time_ms: int, span_ms: int) -> str:
    """A time, as exactly as the span asks for."""
    time = utc_time(time_ms)
    if time is None:
        return f"{time_ms} ms"
    if span_ms >= 3 * 86_400_000:
        return time.strftime("%d %b %H:%M")
    return time.strftime("%H:%M:%S") if span_ms >= 10_000 else time.strftime("%H:%M:%S.") + f"{time_ms % 1000:03}"
