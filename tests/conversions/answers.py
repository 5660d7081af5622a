"""Reads the answers that are kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tests.conversions.cases import VALUES

SPARK: Final = Path(__file__).with_name("spark-4.3.txt")
SPARK_INPUTS: Final = Path(__file__).with_name("spark-4.3-inputs.txt")

Answers = dict[tuple[str, str, str], str]
"""What became of a value, by type, way and value."""


def read(path: Path = SPARK) -> Answers:
    """Read a file of answers.

    A section is of a type and some ways: the first line is the result of all values that no other line names.
    """
    answers: Answers = {}
    kind, ways, results = "", [], {}
    for line in path.read_text().splitlines():
        head = re.fullmatch(r"\[(.+) \| ([^\t]+)\]", line)
        if head:
            kind, ways, results = head[1], head[2].split(", "), {}
            continue
        result, _, texts = line.partition("\t")
        results = dict.fromkeys(texts.split(" ; ") if texts else VALUES, result)
        answers |= {(kind, way, text): result for way in ways for text in results}
    return answers
