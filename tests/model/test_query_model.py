"""Queries of several operators: late acks, lost outputs, several actions, deaths, changes of the graph, rewinds.

Whatever happens, every attempt sees the state that the counting attempts of the batch before lead to, what Spark
commits is durable, and what counts of an operator's subtask is the result of its latest attempt.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest

from statelog import Options
from statelog.errors import StateMissingError
from statelog.reading.consumer import ChangeConsumer
from statelog.reading.open import open_logged
from statelog.rpc.messages import Ack, Acked, Reply, TaskRequest
from statelog.testing.query import new_directory
from tests.model.query_engine import QueryEngine, TaskPlace
from tests.model.query_graph import GRAPHS, Graph, Row, chain
from tests.model.query_journal import Difference
from tests.model.query_plants import PLANTS
from tests.model.query_story import Story

BATCHES = 8
MOVES = (
    "acks at a time",
    "acks sent twice",
    "added operators",
    "batches with several actions",
    "deaths of drivers",
    "deaths of tasks",
    "failed writes",
    "incomplete batches",
    "late acks",
    "lost answers",
    "lost commits",
    "lost outputs",
    "refused acks",
    "refused attempts",
    "refused batches",
    "removed operators",
    "rewinds",
    "states given up",
)


def run_story(graph: str, seed: int) -> Counter[str]:
    """Run a story, and return how often each kind of move was made; a failure tells its last moves."""
    directory = new_directory()
    story = Story(directory, seed, GRAPHS[graph])
    try:
        story.run(BATCHES)
    except Difference as difference:
        lines = "\n".join(story.journal.moves)
        raise Difference(f"graph '{graph}', seed {seed}:\n{lines}\n{difference}") from difference
    finally:
        shutil.rmtree(directory)
    return story.journal.counts


def run_stories(seeds: range) -> Counter[str]:
    """Run a story of each graph for each seed, and return how often each kind of move was made."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        for graph in GRAPHS:
            counts += run_story(graph, seed)
    return counts


@pytest.mark.parametrize(
    "seeds",
    [range(6), *(pytest.param(range(at, at + 10), marks=pytest.mark.extended) for at in range(10, 100, 10))],
    ids=str,
)
def test_every_story_goes_as_in_the_model(seeds: range) -> None:
    counts = run_stories(seeds)
    assert not [move for move in MOVES if not counts[move]], "moves that no story has made"


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_defect_is_found(plant: str) -> None:
    with PLANTS[plant](), pytest.raises((Difference, AssertionError)):
        run_stories(range(100, 110))


# ---- Stories that drivers with a log per operator got wrong ----


@contextmanager
def temporary_engine(*, is_asynchronous: bool) -> Iterator[QueryEngine]:
    """An engine whose directory is removed in the end."""
    directory = new_directory()
    engine = QueryEngine(directory, Options(retained_checkpoints=2), Random(0), is_asynchronous=is_asynchronous)
    yield engine
    engine.close()
    shutil.rmtree(directory)


@pytest.fixture
def engine() -> Iterator[QueryEngine]:
    with temporary_engine(is_asynchronous=False) as engine:
        yield engine


class Tasks:
    """Runs attempts of operators with one subtask one by one, and keeps their acks."""

    def __init__(self, engine: QueryEngine) -> None:
        self._engine = engine
        self.acks: list[tuple[Ack, bytes]] = []

    def run(self, uid: str, batch: int, rows: list[Row], *, hangs: bool = False) -> None:
        """Run an attempt; its ack may stay away."""

        def call(request: TaskRequest, payload: bytes) -> Reply:
            assert self._engine.driver is not None
            if isinstance(request, Ack):
                self.acks.append((request, payload))
                if hangs:
                    return Acked()
            return self._engine.driver.handle(request, payload)

        self._engine.run_task(TaskPlace(uid, batch, 0, self._engine.new_attempt()), rows, call)

    def run_batch(self, batch: int, uids: list[str], *, is_stored: bool = True) -> None:
        """Run a batch of some operators, and let Spark commit it, and store that."""
        self._engine.offer(batch)
        for uid in uids:
            self.run(uid, batch, [(1, 10)])
        self._engine.notes.commit(batch, is_stored=is_stored)


@pytest.fixture
def tasks(engine: QueryEngine) -> Tasks:
    return Tasks(engine)


def start(engine: QueryEngine, graph: Graph) -> None:
    engine.start(graph, dict.fromkeys(graph.uids, 1), keep_local=True)


def test_a_late_ack_of_an_attempt_before_an_equal_one_does_not_count(engine: QueryEngine, tasks: Tasks) -> None:
    start(engine, GRAPHS["one"])
    engine.offer(0)
    tasks.run("only", 0, [(1, 10)])
    tasks.run("only", 0, [(1, 99)], hangs=True)
    tasks.run("only", 0, [(1, 10)])
    assert engine.driver is not None
    engine.driver.handle(*tasks.acks[1])
    assert engine.checkpoints()[0]["only"] == [tasks.acks[2][0].checksums]


def test_a_consumer_is_not_given_what_a_restart_may_take_back() -> None:
    """With asynchronous progress a batch that others follow is not certain yet."""
    with temporary_engine(is_asynchronous=True) as engine:
        tasks = Tasks(engine)
        start(engine, GRAPHS["one"])
        consumer = None
        for batch, is_stored in enumerate([True, True, False, False, True, False]):
            tasks.run_batch(batch, ["only"], is_stored=is_stored)
            consumer = consumer or ChangeConsumer(
                engine.location, open_logged(engine.location, "only", None), "held", pin_s=60, max_bytes=1 << 20
            )
            # Batch 4 was written before its commit was stored, batch 5 after it.
            assert consumer.newest(None).batch == [-1, 0, 1, 1, 1, 4][batch]


def test_an_incomplete_repetition_is_refused(engine: QueryEngine, tasks: Tasks) -> None:
    """The checkpoint of a former start does not count once another start has begun the batch again."""
    start(engine, chain(2))
    engine.offer(0)
    tasks.run("first", 0, [(1, 10)])
    tasks.run("total-1", 0, [(1, 10)])
    engine.die()
    start(engine, chain(2))
    tasks.run("first", 0, [(1, 99)])
    engine.notes.commit(0)
    engine.die()
    start(engine, chain(2))
    engine.offer(1)
    with pytest.raises(StateMissingError):
        tasks.run("total-1", 1, [(1, 10)])


def test_a_given_up_operator_misses_no_batch(engine: QueryEngine, tasks: Tasks) -> None:
    start(engine, chain(2))
    tasks.run_batch(0, ["first", "total-1"])
    engine.stop()
    engine.forget("total-1")
    start(engine, chain(2))
    tasks.run_batch(1, ["first"])
    engine.offer(2)
    with pytest.raises(StateMissingError):
        tasks.run("total-1", 2, [(1, 10)])


def test_a_batch_without_an_added_operator_can_be_taken_back(engine: QueryEngine, tasks: Tasks) -> None:
    start(engine, chain(2))
    tasks.run_batch(0, ["first", "total-1"])
    engine.stop()
    start(engine, chain(3))
    tasks.run_batch(1, ["first", "total-1"])
    engine.stop()
    assert engine.rewind() == 1


def test_an_incomplete_batch_can_be_taken_back_with_two_checkpoints(engine: QueryEngine, tasks: Tasks) -> None:
    start(engine, chain(2))
    for batch in range(2):
        tasks.run_batch(batch, ["first", "total-1"])
    tasks.run_batch(2, ["first"])
    engine.offer(3)
    with pytest.raises(StateMissingError):
        tasks.run("first", 3, [(1, 10)])
    engine.stop()
    assert engine.rewind() == 2
