"""The published figures: ``./dev bench publish [RESULT.json ...]``.

figures.json has every one of them: its value, when it was measured, and where a benchmark's ``--json`` file has it.
Results that are named replace the values that they have. Then every span ``<!--NAME-->...<!--/-->`` of the pages gets
the value as text, and the README's plot is drawn.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import date
from html import escape
from pathlib import Path
from typing import Any, Final

import click
import msgspec

ROOT: Final = Path(__file__).resolve().parents[1]
FILE: Final = ROOT / "benchmarks" / "figures.json"
PLOT: Final = ROOT / "docs" / "pictures" / "speed.svg"
SPAN: Final = re.compile(r"<!--([\w.-]+)-->(.*?)<!--/-->", re.DOTALL)

_NOT_THE_WORK: Final = {"directory", "rounds", "batches", "seconds", "spark_batches", "warm_up"}
"""Settings that make a measurement longer, and do not change what is measured."""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A published figure; its name is its key in the file."""

    command: str
    """The benchmark and its options, without those that only make it longer."""
    path: tuple[str, ...]
    """The keys that lead to it in the result's ``figures``."""
    value: float
    measured: date
    per: tuple[str, ...] = ()
    """Where the divisor is, if it is a ratio of two values."""
    digits: int = 2
    """How many are shown; the others are noise."""
    scale: float = 1
    """The shown number is the value times this."""

    @property
    def text(self) -> str:
        """The figure as pages show it."""
        number = float(f"{self.value * self.scale:.{self.digits - 1}e}")
        decimals = self.digits - 1 - math.floor(math.log10(abs(number))) if number else 0
        return f"{number:,.{max(0, decimals)}f}"


def read() -> dict[str, Figure]:
    """All figures by name."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Figure])


def pages() -> list[Path]:
    """The pages that may show figures; design notes, the changelog and the benchmarks' own page are dated instead."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str, figures: Mapping[str, Figure]) -> str:
    """A page's text with the figures in its spans; KeyError if one is unknown."""
    return SPAN.sub(lambda span: f"<!--{span[1]}-->{figures[span[1]].text}<!--/-->", text)


def with_result(figures: Mapping[str, Figure], result: Mapping[str, Any], today: date) -> dict[str, Figure]:
    """The figures, with the values of those that this result has."""
    options = _options(_command(result))
    return {
        name: msgspec.structs.replace(one, value=_value(one, result["figures"]), measured=today)
        if _options(one.command) == options
        else one
        for name, one in figures.items()
    }


def _command(result: Mapping[str, Any]) -> str:
    """The command of a result, as figures name it."""
    given = {
        f"--{name.replace('_', '-')}": value
        for name, value in result["parameters"].items()
        if name not in _NOT_THE_WORK and value != result["defaults"][name]
    }
    words = [result["benchmark"]]
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            words += [name] if each is True else [name, str(each)]
    return " ".join(words)


def _options(command: str) -> list[str]:
    """The parts of a command whose order does not matter."""
    return sorted(command.split(" --"))


def _value(figure: Figure, found: Any) -> float:
    def at(path: Iterable[str]) -> float:
        value = found
        for key in path:
            if isinstance(value, list):  # of objects: the one with these fields, such as "partitions=2,owner=Spark"
                fields = dict(field.split("=") for field in key.split(","))
                [value] = [one for one in value if all(str(one[name]) == each for name, each in fields.items())]
            else:
                value = {"min": min, "max": max}[key](value.values()) if key in ("min", "max") else value[key]
        return float(value)

    return at(figure.path) / (at(figure.per) if figure.per else 1)


# ---- The plot ----

_ROWS: Final = {"20k": "20,000", "200k": "200,000"}
_SIDES: Final = {"statelog": "count.{}", "Spark's transformWithState": "count.{}.spark"}
_COLORS: Final = ("#2da44e", "#8c959f")
_WIDTH, _LEFT, _BAR = 640, 210, 22


def plot(figures: Mapping[str, Figure]) -> str:
    """Rows per second of the same batches on both sides, as an SVG picture."""
    most = max(figures[name.format(rows)].value for rows in _ROWS for name in _SIDES.values())
    lines, y = [], 34
    for rows, shown in _ROWS.items():
        lines.append(f'<text x="10" y="{y + 14}" class="strong">{shown} rows per batch</text>')
        y += 24
        for color, (side, name) in zip(_COLORS, _SIDES.items(), strict=True):
            one = figures[name.format(rows)]
            width = max(1, round((_WIDTH - _LEFT - 90) * one.value / most))
            lines += [
                f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(side)}</text>',
                f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_BAR - 2}" rx="3" fill="{color}"/>',
                f'<text x="{_LEFT + width + 6}" y="{y + 15}">{one.text}</text>',
            ]
            y += _BAR
        y += 10
    style = (
        'text{font:13px system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:#1f2328}.strong{font-weight:600}'
        ".page{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}}"
    )
    title = "Rows per second, counted by key, on two cores (more is better)"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" role="img" aria-label="{title}">',
            f"<style>{style}</style>",
            f'<rect class="page" width="{_WIDTH}" height="{y}" rx="6"/>',
            f'<text x="10" y="22">{title}</text>',
            *lines,
            "</svg>\n",
        ]
    )


@click.command("publish", short_help="Put the figures of results into the pages.")
@click.argument("results", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def publish(results: Iterable[Path]) -> None:
    """Put the figures of RESULTS, files written with --json, into benchmarks/figures.json and the pages."""
    figures = read()
    for file in results:
        before, figures = figures, with_result(figures, json.loads(file.read_bytes()), date.today())
        changed = [name for name in figures if figures[name] is not before[name]]
        click.echo(f"{file}: {', '.join(changed) or 'no published figure has its command'}")
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
    for page in pages():
        page.write_text(filled(page.read_text(), figures))
    PLOT.write_text(plot(figures))
