"""Reading state from outside: whole states, and single keys of a large one, without Spark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import statelog
from benchmarks.child import run_in_child
from benchmarks.figures import shown, summary
from benchmarks.frame import POSITIVE, STORED_KEYS, Result, Target, alternate, option, require_space
from benchmarks.processors import OUTPUT, Count, KeepPayload
from benchmarks.query import Side, count_checks, last_batch, payload, rate_source, start, stop_when

ONE_LEVEL: Final = "one level"
TEN_RUNS: Final = "ten runs"
PAYLOADS: Final = "payloads"

_RUNS: Final = 10
_PAYLOAD_BYTES: Final = 1000
_LOAD_ROWS: Final = 500_000
"""Of a batch that builds the state with payloads."""
_LEAST_ROWS: Final = {ONE_LEVEL: 5e6, TEN_RUNS: 2.5e6}
_MOST_LOOKUP_MS: Final = 50.0
_POLL_S: Final = 0.1


@dataclass(frozen=True)
class Settings:
    rows: int = option(5_000_000, "Of the states that are read as a whole, each a key and a number.", STORED_KEYS)
    gigabytes: float = option(1.0, "Size of the state in which single keys are looked up.", POSITIVE)
    lookups: int = option(1_000, "Keys that are looked up in it, one after the other.")
    parallelism: int = option(2, "Subtasks.")
    rounds: int = option(5, "How often to read each state, every time in a fresh process.")


QUICK: Final = [Settings(rows=2_000, gigabytes=0.002, lookups=20, rounds=1)]


@dataclass(frozen=True, kw_only=True)
class StoredState(Side):
    """A state that a query has stored."""

    keys: int
    batches: int

    @property
    def has_payloads(self) -> bool:
        """Whether the values are long."""
        return self.side == PAYLOADS

    def measure(self, directory: Path) -> dict[str, Any]:
        """Run the query, each batch with other keys, until every key has a row."""
        session = self.session(directory)
        rows_per_batch = -(-self.keys // self.batches)
        rows = rate_source(session, rows_per_batch, self.parallelism).select(F.col("value").alias("key"))
        query = start(self._output(rows), count_checks(), directory)
        stop_when(query, lambda query: last_batch(query) >= self.batches - 1, _POLL_S)
        session.stop()
        return {}

    def _output(self, rows: DataFrame) -> DataFrame:
        # Ten runs are the changes of ten batches; one level is the state itself, stored by its only batch.
        options = (
            statelog.Options(tuning=statelog.Tuning(materialization=False))
            if self.batches > 1
            else statelog.Options(tuning=statelog.Tuning(changelog=False))
        )
        if self.has_payloads:
            rows = rows.select("key", payload("key", _PAYLOAD_BYTES))
            return self.transform(rows, KeepPayload(), "key long, n long, found long", statelog.Options())
        return self.transform(rows, Count(), OUTPUT, options)

    def read(self, checkpoint: Path) -> dict[str, float]:
        """Read the whole state; RuntimeError if it is not right."""
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        rows = keys = numbers = 0
        for batch in statelog.read_state(checkpoint):
            rows += batch.num_rows
            keys += pc.sum(batch.column("key_key")).as_py()
            numbers += pc.sum(batch.column("value_n")).as_py()
        taken = {"wall_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - started_cpu_s}
        stored = -(-self.keys // self.batches) * self.batches
        if (rows, keys, numbers) != (stored, stored * (stored - 1) // 2, stored):
            raise RuntimeError(f"{self.side}: read {rows} rows of {stored}, or others")
        return {"rows": rows, **taken}

    def look_up(self, checkpoint: Path, lookups: int) -> dict[str, Any]:
        """Look keys up, the first one of them with a reader that is opened for it; RuntimeError if one is wrong."""
        chosen = np.random.default_rng(1).integers(0, self.keys, lookups + 1).tolist()
        started_s = time.perf_counter()
        with statelog.open_state(checkpoint) as reader:
            durations_s = list(_durations(reader, chosen))
            cold_s = time.perf_counter() - started_s - sum(durations_s[1:])
        return {"cold_s": cold_s, "lookups_s": durations_s[1:]}


def _durations(reader: Any, keys: list[int]) -> Iterator[float]:
    for key in keys:
        started_s = time.perf_counter()
        [row] = reader.read(keys=[key]).read_all().to_pylist()
        yield time.perf_counter() - started_s
        if row["key_key"] != key or row["value_n"] != 1 or len(row["value_payload"]) != _PAYLOAD_BYTES:
            raise RuntimeError(f"key {key} has {row['key_key']}, {row['value_n']}")


def run(settings: Settings, place: Path) -> Result:
    payload_keys = max(1, int(settings.gigabytes * 1e9 / _PAYLOAD_BYTES))
    require_space(place, 4 * payload_keys * _PAYLOAD_BYTES + 200 * settings.rows, "Give another --directory.")
    states = {
        ONE_LEVEL: StoredState.of(settings, side=ONE_LEVEL, keys=settings.rows, batches=1),
        TEN_RUNS: StoredState.of(settings, side=TEN_RUNS, keys=settings.rows, batches=_RUNS),
        PAYLOADS: StoredState.of(
            settings, side=PAYLOADS, keys=payload_keys, batches=max(1, round(payload_keys / _LOAD_ROWS))
        ),
    }
    folders = {name: place / name.replace(" ", "-") for name in states}
    for name, state in states.items():
        click.echo(f"building the state: {name} ...", err=True)
        folders[name].mkdir()
        run_in_child(partial(state.measure, folders[name]), folders[name])
    calls = {
        name: partial(run_in_child, partial(states[name].read, folders[name] / "checkpoint"), folders[name])
        for name in (ONE_LEVEL, TEN_RUNS)
    }
    read = alternate(calls, settings.rounds)
    look_up = partial(states[PAYLOADS].look_up, folders[PAYLOADS] / "checkpoint", settings.lookups)
    looked_up = [run_in_child(look_up, folders[PAYLOADS]) for _ in range(settings.rounds)]
    stored = sum(path.stat().st_size for path in (folders[PAYLOADS] / "checkpoint" / "statelog").rglob("*.*"))
    rates = {name: statistics.median(one["rows"] / one["cpu_s"] for one in rounds) for name, rounds in read.items()}
    lookups_ms = summary(1000 * each for one in looked_up for each in one["lookups_s"])
    cold_ms = 1000 * statistics.median(one["cold_s"] for one in looked_up)
    return Result(
        figures={
            "rows_per_cpu_s": rates,
            "lookup_ms": lookups_ms,
            "cold_lookup_ms": cold_ms,
            "stored_bytes": stored,
            "read": read,
            "looked_up": looked_up,
        },
        targets=[
            *(
                Target(f"{name}: rows/s per core", rates[name], least, "at_least")
                for name, least in _LEAST_ROWS.items()
            ),
            Target(
                f"look-up in {stored / 1e9:.2g} GB: p99, ms",
                lookups_ms.get("p99", lookups_ms["max"]),
                _MOST_LOOKUP_MS,
                "at_most",
            ),
        ],
        rows=[
            *(
                {
                    "read": f"{name}, {settings.rows:,} rows",
                    "rows/s per core": f"{rates[name]:,.0f}",
                    "seconds": f"{statistics.median(one['wall_s'] for one in read[name]):.2f}",
                    "ms": "",
                }
                for name in read
            ),
            {"read": f"a key of {payload_keys:,}", "rows/s per core": "", "seconds": "", "ms": shown(lookups_ms, 2)},
            {"read": "the first key, with opening", "rows/s per core": "", "seconds": "", "ms": f"{cold_ms:,.1f}"},
        ],
        remarks=[
            f"Medians of {settings.rounds} rounds, each in a fresh process. Rows/s per core: by the CPU time of all"
            " threads. Keys and values are 8-byte numbers.",
            f"Look-ups: one at a time with an open reader, in {stored / 1e9:.2f} GB, {_PAYLOAD_BYTES} bytes per key.",
        ],
    )
