"""Where statelog's answers differ from Spark's, and why: rules, of which the first that fits counts."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.conversions.answers import Answers

RULES: Final = Path(__file__).with_name("differences.toml")


@dataclass(frozen=True)
class Rule:
    """A reason for differences.

    Parameters
    ----------
    title, reason : str
        What Spark does, and why statelog does otherwise; words of the docs.
    spark, statelog : str
        What the answers look like, as regular expressions.
    ways, types, values : str
        Where the rule holds, as regular expressions.
    """

    title: str
    reason: str
    spark: str
    statelog: str
    ways: str = ".*"
    types: str = ".*"
    values: str = ".*"

    def fits(self, case: tuple[str, str, str], spark: str, statelog: str) -> bool:
        """Whether the rule is the reason of a difference."""
        kind, way, text = case
        pairs = [
            (self.spark, spark),
            (self.statelog, statelog),
            (self.ways, way),
            (self.types, kind),
            (self.values, text),
        ]
        return all(re.fullmatch(pattern, shown) for pattern, shown in pairs)


@dataclass(frozen=True)
class Difference:
    """A case in which the answers differ."""

    kind: str
    way: str
    text: str
    spark: str
    statelog: str


def rules() -> list[Rule]:
    """The rules, in order."""
    return [Rule(**entry) for entry in tomllib.loads(RULES.read_text())["difference"]]


def differences(spark: Answers, statelog: Answers) -> list[Difference]:
    """All cases that differ."""
    return [Difference(*case, answer, statelog[case]) for case, answer in spark.items() if statelog[case] != answer]


def by_rule(found: list[Difference]) -> dict[Rule | None, list[Difference]]:
    """Differences by the rule that explains them; None has those without."""
    known = rules()
    sorted_out: dict[Rule | None, list[Difference]] = {rule: [] for rule in [*known, None]}
    for one in found:
        case = (one.kind, one.way, one.text)
        sorted_out[next((rule for rule in known if rule.fits(case, one.spark, one.statelog)), None)].append(one)
    return sorted_out
