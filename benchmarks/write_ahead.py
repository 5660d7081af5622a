"""What write-ahead output costs: the same aggregates into the same sink, by foreachBatch and by write_ahead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql.streaming import DataStreamWriter

import statelog
from benchmarks.aggregate import AggregateSide
from benchmarks.cases import Ratio, compare_cases
from benchmarks.frame import NOT_NEGATIVE, POSSIBLE_KEYS, Result, option, require_measured
from benchmarks.skew import SKEW_HELP, SKEWS, UNIFORM

WRITE_AHEAD: Final = "write_ahead"
DIRECT: Final = "foreachBatch"


@dataclass(frozen=True)
class Settings:
    rows_per_batch: tuple[int, ...] = option((1_000, 20_000, 200_000), "Of both sides; may be repeated.")
    keys: int = option(1_000_000, "Number of possible keys.", POSSIBLE_KEYS)
    skew: str = option(UNIFORM, SKEW_HELP, SKEWS)
    batches: int = option(30, "Of both sides.")
    parallelism: int = option(2, "Subtasks and cores.")
    warm_up: int = option(10, "First batches to leave out.", NOT_NEGATIVE)
    rounds: int = option(1, "How often both sides run.")


QUICK: Final = [Settings(rows_per_batch=(2_000,), keys=1_000, batches=3, warm_up=1)]


@dataclass(frozen=True, kw_only=True)
class WriteAheadSide(AggregateSide):
    """Aggregates rows by key, for a sink that reads all of them once."""

    def writer(self, output: DataFrame) -> DataStreamWriter:
        if self.side == DIRECT:
            return output.writeStream.foreachBatch(_read)
        return statelog.write_ahead(output, _read, parallelism=self.parallelism)


def _read(rows: DataFrame, batch: int) -> None:
    rows.write.format("noop").mode("append").save()


def run(settings: Settings, place: Path) -> Result:
    require_measured(settings.batches, settings.warm_up)
    cases = {
        f"{size:,} rows": {
            side: WriteAheadSide.of(settings, side=side, rows_per_batch=size) for side in (DIRECT, WRITE_AHEAD)
        }
        for size in settings.rows_per_batch
    }
    result = compare_cases(cases, [Ratio(WRITE_AHEAD, DIRECT, 0.5)], place, settings.rounds, settings.warm_up)
    return replace(result, remarks=[*result.remarks, *(_more(case, sides) for case, sides in result.figures.items())])


def _more(case: str, sides: dict[str, Any]) -> str:
    direct_ms, behind_ms = (sides[name]["batch_ms"]["median"] for name in (DIRECT, WRITE_AHEAD))
    return f"{case}: a batch takes {behind_ms - direct_ms:.0f} ms more than with {DIRECT}."
