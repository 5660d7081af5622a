"""The figures of the pages are those of benchmarks/figures.json, which the benchmarks' results fill."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import published
from benchmarks.__main__ import main as bench

ROOT = Path(__file__).resolve().parents[2]
RATIO = re.compile(
    r"\d[\d.,]* times (?:as|better|faster|more|slower|the rate|Spark)|\d[\d.,]* (?:million )?rows(?:/s| per second)"
)
"""How text says that something is so many times as fast, or how fast it is."""


def test_pages_and_plot_show_the_figures() -> None:
    known = published.read()
    used = set()
    for page in published.pages():
        text = page.read_text()
        used |= {span[1] for span in published.SPAN.finditer(text)}
        assert text == published.filled(text, known), f"{page}: run ./dev bench publish"
    assert used == known.keys()
    assert published.PLOT.read_text() == published.plot(known)


def test_no_page_has_a_ratio_or_a_rate_of_its_own() -> None:
    found = []
    for page in published.pages():
        name = str(page.relative_to(ROOT))
        text = published.SPAN.sub("", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE))
        found += [f"{name}: {ratio[0]}" for ratio in RATIO.finditer(text)]
    assert found == []


def test_every_command_is_one() -> None:
    for name, one in published.read().items():
        benchmark, *options = one.command.split()
        command = bench.commands[benchmark]
        context = click.Context(command)
        assert command.parse_args(context, options) == [], name


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (311_526.4, 3, "312,000"),
        (17.78, 2, "18"),
        (3.31, 2, "3.3"),
        (6.0, 2, "6.0"),
        (0.121, 2, "0.12"),
        (0.6, 1, "0.6"),
        (147.2, 3, "147"),
        (9.97, 2, "10"),
        (0, 2, "0"),
    ],
)
def test_a_figure_shows_the_digits_that_are_no_noise(value: float, digits: int, text: str) -> None:
    assert published.Figure("count", ("x",), value, date(2026, 1, 1), digits=digits).text == text


def test_a_result_replaces_the_figures_of_its_command_only() -> None:
    def figure(command: str, *path: str, per: tuple[str, ...] = ()) -> Any:
        return published.Figure(command, path, 1.0, date(2026, 1, 1), per)

    known = {
        "rate": figure("count --keys 5 --skew zipf", "sides", "a", "rate"),
        "ratio": figure("count --keys 5 --skew zipf", "sides", "a", "rate", per=("sides", "b", "rate")),
        "most": figure("count --keys 5 --skew zipf", "by_kind", "max"),
        "bill": figure("count --keys 5 --skew zipf", "bills", "partitions=2,owner=Spark", "dollars"),
        "other keys": figure("count", "sides", "a", "rate"),
    }
    result = {
        "benchmark": "count",
        "parameters": {"skew": "zipf", "keys": 5, "sizes": [1, 2], "batches": 3, "windows": False, "directory": None},
        "defaults": {"keys": 9, "skew": "uniform", "sizes": [1, 2], "batches": 40, "windows": False},
        "figures": {
            "sides": {"a": {"rate": 12}, "b": {"rate": 4}},
            "by_kind": {"x": 7, "y": 8},
            "bills": [
                {"partitions": 2, "owner": "statelog", "dollars": 1},
                {"partitions": 2, "owner": "Spark", "dollars": 3},
            ],
        },
    }
    found = published.with_result(known, result, date(2026, 2, 2))
    assert {name: one.value for name, one in found.items()} == {
        "rate": 12,
        "ratio": 3,
        "most": 8,
        "bill": 3,
        "other keys": 1,
    }
    assert {name for name, one in found.items() if one.measured == date(2026, 2, 2)} == known.keys() - {"other keys"}


def test_an_unknown_figure_in_a_page_is_an_error() -> None:
    with pytest.raises(KeyError, match="nothing"):
        published.filled("<!--nothing-->1<!--/-->", {})
