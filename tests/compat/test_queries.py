"""A query of operators of all kinds, as each version has stored its log: keyed and operator state, windows, aggregates,
and the query's output.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

import statelog
from statelog import Options, Tuning
from statelog.coordinator.batch import BatchTime
from statelog.local.stored_reader import read_stored
from statelog.log.open import open_location
from statelog.tasks.output_task import stored_batches
from statelog.testing.keyed import KeyedQuery
from statelog.testing.query import LocalOperator
from statelog.testing.rows import OperatorArguments
from statelog.testing.unkeyed import UnkeyedQuery
from tests.compat import aggregates_support, windows_support
from tests.compat.fixtures_support import fixture_hash
from tests.compat.savepoints_support import Collect
from tests.model.engine import command_query, command_rows
from tests.model.write_ahead_model_support import OUTPUT, OutputOperator
from tests.query_runner import QueryRunner

FIXTURES: Final = Path(__file__).parent / "queries"
OPTIONS: Final = Options(
    file_merging="within",
    inline_budget_bytes=2000,
    retained_checkpoints=2,
    materialization_interval_s=0,
    tuning=Tuning(merge_fan_in=2, orphan_min_age_s=0),
)
BATCHES: Final = range(5)
RESTART: Final = 3
"""The batch with which the second start begins."""
ADDED: Final = 2
"""The batch with which the aggregates begin, in a start of their own."""


NOTHING: Final = [("op", "map"), ("op", "value")]
"""States without rows."""


@dataclass(frozen=True)
class Member:
    """An operator of the query, and its input in a batch."""

    operator: LocalOperator
    data: Callable[[int], Any]


def members() -> dict[str, Member]:
    """The operators, by uid."""
    keyed = command_query("op", fixture_hash, OPTIONS)
    words = UnkeyedQuery(
        Collect(),
        OperatorArguments(input="word string", output="json string", broadcast="name string, n long", uid="words"),
        OPTIONS,
    )
    plan = windows_support.plan("sliding")
    windows = KeyedQuery(
        plan.operator,
        OperatorArguments(
            input=windows_support.INPUT,
            output=plan.output,
            keys=["user"],
            timeMode=str(plan.time_mode),
            eventTime="time",
            uid="windows",
        ),
        OPTIONS,
    )
    made = aggregates_support.plan("agg")
    aggregates = KeyedQuery(
        made.operator,
        OperatorArguments(
            input=aggregates_support.INPUT,
            output=made.output,
            keys=["user"],
            timeMode=str(made.time_mode),
            uid="aggregates",
        ),
        OPTIONS,
    )
    return {
        "op": Member(
            keyed.operator,
            lambda batch: command_rows(keyed, [((number, None), ("append", str(batch))) for number in range(9)]),
        ),
        "words": Member(words.operator, lambda batch: words.data([(str(batch),)], [("batch", batch)])),
        "windows": Member(
            windows.operator,
            lambda batch: windows.data(
                [("a", datetime.fromtimestamp(ms / 1000, UTC), ms) for ms in range(8 * batch, 8 * batch + 5)]
            ),
        ),
        "aggregates": Member(
            aggregates.operator,
            lambda batch: aggregates.data(aggregates_support.rows_of("b", range(300 * batch, 300 * batch + 400))),
        ),
        OUTPUT: Member(OutputOperator(), lambda batch: [["row", batch, number] for number in range(3)]),
    }


def runner(directory: Path) -> QueryRunner:
    made = QueryRunner(directory, OPTIONS, open_store=open_location)
    made.times = {batch: BatchTime(1000 + batch, 8 * batch - 5, 8 * batch - 13) for batch in range(20)}
    return made


def run(query: QueryRunner, batch: int) -> dict[str, list[str]]:
    """Run a batch of all operators; returns what each gives, as text, without an order."""
    found: dict[str, list[str]] = {}
    for uid, member in members().items():
        if uid in query.operators:
            outputs = query.run_operator(uid, batch, member.data(batch))
            found[uid] = sorted(str(row) for output in outputs for row in output.to_pylist())
    found["stored output"] = stored_output(query, batch)
    return found


def stored_output(query: QueryRunner, batch: int) -> list[str]:
    checkpoint, store = query.coordinator.durable_checkpoint(OUTPUT, batch), open_location(query.location)
    stored = [read_stored(store, segment, OUTPUT) for segment in checkpoint.segments]
    return sorted(
        text for data in stored for one in stored_batches(data, "output") for text in one.column(0).to_pylist()
    )


def start(query: QueryRunner, batch: int, parallelism: int, *, without: str = "") -> None:
    operators = [member.operator for uid, member in members().items() if uid != without]
    query.start(operators, parallelism, batch, keep_local=False)


def begin(directory: Path) -> QueryRunner:
    """A query that has run its first batches, in three starts."""
    query = runner(directory)
    for batch in BATCHES:
        if batch in (0, ADDED, RESTART):
            if batch:
                query.stop()
            start(query, batch, 3 if batch == RESTART else 2, without="aggregates" if batch < ADDED else "")
        run(query, batch)
    query.stop()
    return query


def write(directory: Path) -> None:
    """Write the fixture."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(begin(Path(scratch)).location, directory)


@pytest.fixture(params=sorted(FIXTURES.glob("*")), ids=lambda path: path.name)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> QueryRunner:
    shutil.copytree(request.param, tmp_path / "stored" / "location")
    return runner(tmp_path / "stored")


@pytest.mark.parametrize("parallelism", [1, 3])
def test_it_goes_on_as_a_query_that_has_run_from_the_beginning(
    stored: QueryRunner, tmp_path: Path, parallelism: int
) -> None:
    fresh = begin(tmp_path / "fresh")
    for query in (stored, fresh):
        start(query, BATCHES.stop, parallelism)
    for batch in range(BATCHES.stop, BATCHES.stop + 3):
        assert run(stored, batch) == run(fresh, batch), batch


def test_it_is_read_as_a_query_that_has_run_from_the_beginning(stored: QueryRunner, tmp_path: Path) -> None:
    fresh = begin(tmp_path / "fresh")
    assert statelog.verify(stored.location).damages == ()
    uids = names(stored.location)
    assert uids == names(fresh.location) == ["aggregates", "op", OUTPUT, "windows", "words"]
    states = [(info.uid, info.state) for uid in uids for info in statelog.list_states(stored.location, uid)]
    assert {uid for uid, _ in states} == set(uids) - {OUTPUT}
    for uid, state in states:
        found, expected = (
            sorted(
                json.dumps(row, default=str)
                for row in statelog.read_state(query.location, uid, state=state).read_all().to_pylist()
            )
            for query in (stored, fresh)
        )
        assert found == expected, uid
        assert found or (uid, state) in NOTHING, uid


def names(location: str) -> list[str]:
    return [info.uid for info in statelog.list_operators(location)]
