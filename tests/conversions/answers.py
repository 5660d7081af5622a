"""The files in which answers are kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.conversions.cases import INPUTS, VALUES

SPARK: Final = Path(__file__).with_name("spark-4.3.txt")
STATELOG: Final = Path(__file__).with_name("statelog.txt")
SPARK_INPUTS: Final = Path(__file__).with_name("spark-4.3-inputs.txt")

Answers = dict[tuple[str, str, str], str]
"""What became of a value, by type, way and value."""


def read(path: Path) -> Answers:
    """Read a file of answers.

    A section is of a type and some ways, with a line for each result. The first result is that of all values that no
    other line names; the others have their values behind a tab.
    """
    answers: Answers = {}
    kind, ways = "", [""]
    for line in path.read_text().splitlines():
        head = re.fullmatch(r"\[(.+) \| ([^\t]+)\]", line)
        if head:
            kind, ways = head[1], head[2].split(", ")
            continue
        result, _, texts = line.partition("\t")
        named = texts.split(" ; ") if texts else _all_values(kind, path)
        answers |= {(kind, way, text): result for way in ways for text in named}
    return answers


def write(path: Path, answers: Answers) -> None:
    """Write answers in the form that :func:`read` takes."""
    by_way: dict[tuple[str, str], dict[str, str]] = {}
    for (kind, way, text), result in answers.items():
        by_way.setdefault((kind, way), {})[text] = result
    sections: dict[tuple[str, str], list[str]] = {}
    for (kind, way), found in by_way.items():
        sections.setdefault((kind, _as_text(found)), []).append(way)
    path.write_text("".join(f"[{kind} | {', '.join(ways)}]\n{text}" for (kind, text), ways in sections.items()))


def _all_values(kind: str, path: Path) -> list[str]:
    return [*INPUTS[kind], "null"] if path == SPARK_INPUTS else VALUES


def _as_text(found: dict[str, str]) -> str:
    by_result: dict[str, list[str]] = {}
    for text, result in found.items():
        by_result.setdefault(result, []).append(text)
    (others, _), *rest = sorted(by_result.items(), key=lambda item: -len(item[1]))
    return "".join([f"{others}\n", *(f"{result}\t{' ; '.join(texts)}\n" for result, texts in rest)])
