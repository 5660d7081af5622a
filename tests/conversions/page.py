"""Generates docs/conversions.md from the answers: ``./dev python -m tests.conversions.page``."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.conversions.answers import SPARK, STATELOG, read
from tests.conversions.cases import TYPES, VALUES
from tests.conversions.differences import Difference, by_rule, differences

PAGE: Final = Path(__file__).parents[2] / "docs" / "conversions.md"

_MOST_VALUES: Final = 8
_MOST_LINES: Final = 14

_HEAD: Final = """# Conversion of Python values

A value that a processor stores in a state or returns is converted to the Spark type of the field. A conversion that
would lose something fails instead, with an error that names the state or column, the field, its declared type, and the
reason. The error is raised by the call that writes the value to the state, so a processor can catch it and continue.
Rows, frames, states and map keys follow the same rules. NaN becomes null in frames, and in fields whose type has no
NaN.

This page is generated from the results of Spark 4.3 and statelog for {values} values in {types} types, each as a value,
a list element, a map key, a column of an output row and a column of an output frame (`tests/conversions`; the session
and the processes use New York time). Input columns and keys reach processors as in Spark;
[coming from Spark](coming-from-spark.md) lists the few that differ. Tables for `initialState` are cast by Spark, where
nothing can be lost: [savepoints](savepoints.md).

## Accepted values

This table shows values in a value state. The result is what `get()` returns.

| type | values | result |
|---|---|---|
"""

_BETWEEN: Final = """
## Differences from Spark

"error" is an error that names the field, and "refused" an error when the query is built. In the column "in", "states"
stands for a value, a list element and a map key; a "bare" value or map key is not in a tuple.
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
                text += f"\n`tests/conversions` has {len(lines) - _MOST_LINES} more such lines.\n"
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
