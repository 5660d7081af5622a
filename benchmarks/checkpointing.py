"""What durable checkpoints cost: the same queries with their changes stored, and with their changes dropped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from benchmarks import aggregate, count, dedup
from benchmarks.cases import Ratio, compare_cases
from benchmarks.frame import NOT_NEGATIVE, POSSIBLE_KEYS, Result, option, require_measured
from benchmarks.query import BatchSide
from benchmarks.skew import SKEW_HELP, SKEWS, UNIFORM

ON: Final = "stored"
OFF: Final = "dropped"

_QUERIES: Final[dict[str, Any]] = {
    "count": count.CountSide.of,
    "aggregate": aggregate.AggregateSide.of,
    "dedup": partial(dedup.DedupSide.of, repeated=dedup.HALF, ttl_s=0),
}


@dataclass(frozen=True)
class Settings:
    query: tuple[str, ...] = option(
        tuple(_QUERIES), "Those of the benchmarks of these names; may be repeated.", click.Choice(list(_QUERIES))
    )
    rows_per_batch: int = option(200_000, "Of both sides.")
    keys: int = option(1_000_000, "Number of possible keys; of dedup those that are repeated.", POSSIBLE_KEYS)
    skew: str = option(UNIFORM, SKEW_HELP, SKEWS)
    batches: int = option(16, "Of both sides.")
    parallelism: int = option(2, "Subtasks and cores.")
    warm_up: int = option(4, "First batches to leave out.", NOT_NEGATIVE)
    rounds: int = option(5, "How often both sides run.")


QUICK: Final = [Settings(query=("count", "dedup"), rows_per_batch=5_000, keys=1_000, batches=3, warm_up=1, rounds=1)]


def run(settings: Settings, place: Path) -> Result:
    require_measured(settings.batches, settings.warm_up)
    cases: dict[str, dict[str, BatchSide]] = {
        name: {side: _QUERIES[name](settings, side="statelog", is_durable=side == ON) for side in (ON, OFF)}
        for name in settings.query
    }
    result = compare_cases(cases, [Ratio(ON, OFF, 0.95)], place, settings.rounds, settings.warm_up)
    return Result(
        figures={
            "sides": result.figures,
            "lower_bounds": {name: _bound(each) for name, each in result.figures.items()},
        },
        targets=result.targets,
        rows=result.rows,
        remarks=[
            *result.remarks,
            *(
                f"{name}: if the whole subtask's part of the side '{OFF}' ({each[OFF]['subtask_ms']['median']:.1f} ms)"
                f" were checkpoints too, the ratio would be {_bound(each):.3f}."
                for name, each in result.figures.items()
            ),
        ],
    )


def _bound(sides: dict[str, dict[str, Any]]) -> float:
    """The ratio, if the side without durable changes did not even encode what its own state reads."""
    on_ms, off_ms = (sides[name]["batch_ms"]["median"] for name in (ON, OFF))
    bound: float = (off_ms - sides[OFF]["subtask_ms"]["median"]) / on_ms
    return bound
