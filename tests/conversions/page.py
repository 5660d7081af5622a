"""Prints docs/conversions.md from the answers: ``./dev python -m tests.conversions.page``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.conversions.answers import SPARK, STATELOG, read
from tests.conversions.cases import TYPES, VALUES
from tests.conversions.differences import Difference, by_rule, differences

PAGE: Final = Path(__file__).parents[2] / "docs" / "conversions.md"

_MOST_VALUES: Final = 8
_MOST_LINES: Final = 14

_HEAD: Final = """# What becomes of Python values

A value that a processor puts into a state or returns is converted to the field's Spark type. A conversion loses
nothing, or it fails with the state or column, the field, its declared type, and the reason. The call that writes a
value into a state raises the error, so a processor can catch it and continue. Rows, frames, states and map keys follow
the same rules; NaN is null in frames, and where a field has no NaN of its own.

This page is printed from what Spark 4.3 and statelog made of {values} values in {types} types, each as a value, a list
element, a map key, a column of an output row and of an output frame (`tests/conversions`; session and processes in New
York). Input columns and keys reach processors as Spark gives them; [coming from Spark](coming-from-spark.md) names the
few that differ. Tables for `initialState` are cast by Spark, where nothing can be lost: [savepoints](savepoints.md).

## What fields take

In a value state; the result is what `get()` returns.

| type | values | become |
|---|---|---|
"""

_BETWEEN: Final = """
## Where Spark does otherwise

"error" is an error that names the field; "refused" one when the query is built.
"""

_TABLE: Final = """
| type | in | value | Spark 4.3 | statelog |
|---|---|---|---|---|
"""


def page() -> str:
    """The text of the page."""
    spark, own = read(SPARK), read(STATELOG)
    text = _HEAD.format(values=len(VALUES), types=len(TYPES)) + "".join(_taken(kind, own) for kind in TYPES)
    text += _BETWEEN
    for rule, found in by_rule(differences(spark, own)).items():
        if rule is not None:
            lines = _lines(found)
            text += f"\n### {rule.title}\n\n{rule.reason}\n{_TABLE}" + "".join(lines[:_MOST_LINES])
            if len(lines) > _MOST_LINES:
                text += f"\nand {len(lines) - _MOST_LINES} more such lines in `tests/conversions`.\n"
    return text


def _taken(kind: str, own: dict[tuple[str, str, str], str]) -> str:
    by_result: dict[str, list[str]] = {}
    for text in VALUES:
        result = own[kind, "value", text]
        if result not in ("error", "refused", "None"):
            by_result.setdefault(result, []).append(text)
    return "".join(f"| {kind} | {_values(texts)} | {_code(result)} |\n" for result, texts in by_result.items())


def _lines(found: list[Difference]) -> list[str]:
    """A line for all cases with the same answers; types and ways in which the same values have them stand together."""
    ways: dict[tuple[str, str, str, str], list[str]] = {}
    for one in found:
        ways.setdefault((one.spark, one.statelog, one.kind, one.text), []).append(one.way)
    texts: dict[tuple[str, str, str, str], list[str]] = {}
    for (spark, own, kind, text), where in ways.items():
        texts.setdefault((spark, own, kind, _ways(where)), []).append(text)
    kinds: dict[tuple[str, str, str, str], list[str]] = {}
    for (spark, own, kind, where_shown), named in texts.items():
        kinds.setdefault((spark, own, where_shown, _values(named)), []).append(kind)
    return [
        f"| {', '.join(of)} | {where} | {values} | {_code(spark)} | {_code(own)} |\n"
        for (spark, own, where, values), of in kinds.items()
    ]


def _ways(where: list[str]) -> str:
    states = {"value", "list", "map key"}
    rest = [way for way in where if way not in states] if states <= set(where) else where
    return ", ".join((["states"] if states <= set(where) else []) + rest)


def _values(texts: list[str]) -> str:
    shown = ", ".join(map(_code, texts[:_MOST_VALUES]))
    return f"{shown} and {len(texts) - _MOST_VALUES} more" if len(texts) > _MOST_VALUES else shown


def _code(text: str) -> str:
    words = {
        "error": "error",
        "refused": "refused",
        "None": "null",
        "a name of a Java object": "a name of a Java object",
    }
    return words.get(text) or f"`{text}`".replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
