"""Queries and their branches over several generations, with whatever tools do to them, against a plain model.

After each move every query is verified, read from outside and started on new hosts, and so is what its pins keep.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

import statelog
from statelog import Options, StateMissingError, Step, Tuning
from statelog.coordinator.batch import BatchTime
from statelog.history.pins import Pin, read_pin
from statelog.history.query_history import QueryHistory, read_history
from statelog.log.open import open_location
from statelog.storage import LocalStore
from statelog.testing.keyed import KeyedQuery
from statelog.testing.query import Crash, ManualClock
from statelog.testing.rows import OperatorArguments
from statelog.testing.unkeyed import UnkeyedQuery
from tests.compat.savepoints_support import Collect
from tests.model.engine import CommandProcessor, Key, command_query, command_rows
from tests.model.stored_files import folder_of, needed_objects
from tests.query_runner import QueryRunner

KEYS: Final[list[Key]] = [(number, None) for number in range(5)]
NAMES: Final = ("k1", "k2", "k3", "u1", "u2")
"""Operators with keys, and operators without."""
MOST_QUERIES: Final = 4
MOVES: Final = 40

SEEN: Final[list[str]] = []
"""What tasks have found: keys with their elements, as JSON."""

State = dict[Any, list[str]]
"""The elements of each key; of an operator without keys all of them are one list."""
States = dict[str, State]
"""By the operators' identities."""


class Commands(CommandProcessor):
    """Tells what it reads, also if its task dies before it gives an output."""

    def handleInputRows(self, key: Key, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for (text,) in super().handleInputRows(key, rows, timerValues):
            _, read = json.loads(text)
            SEEN.append(json.dumps([key, read and read[1]]))
            yield (text,)


class Words(Collect):
    """Tells what it finds as well."""

    def process(self, rows: Iterator[Any], context: statelog.OperatorContext) -> Iterator[Any]:
        SEEN.append(json.dumps([None, [word for (word,) in self._words.get()]]))
        yield from super().process(rows, context)


def hash_of(key: Key) -> int:
    return (key[0] or 0) * 2**61


def by_uid(uid: str, options: Options) -> KeyedQuery | UnkeyedQuery:
    """The operator that the program calls so."""
    if uid.startswith("k"):
        return command_query(uid, hash_of, options, Commands())
    arguments = OperatorArguments(input="word string", output="json string", broadcast="name string, n long", uid=uid)
    return UnkeyedQuery(Words(), arguments, options)


@dataclass
class Branch:
    """A query of the family, and its model."""

    root: Path
    query_id: str
    options: Options
    states: dict[int, States] = field(default_factory=dict)
    """The state after each batch on the line."""
    names: dict[str, str] = field(default_factory=dict)
    """Names of the operators, by identity."""
    pinned: dict[str, tuple[int, States]] = field(default_factory=dict)
    """What the pins that users have made keep, by their names."""
    times: dict[int, BatchTime] = field(default_factory=dict)
    runs: int = 0

    def __post_init__(self) -> None:
        self.checkpoint = self.root / "checkpoint"
        self.location = str(self.checkpoint / "statelog")
        self.runner = QueryRunner(
            self.root / "hosts", self.options, location=self.location, query_id=self.query_id, open_store=open_location
        )
        self.runner.times = self.times

    @property
    def history(self) -> QueryHistory:
        """The log, as another process reads it."""
        return read_history(open_location(self.location))

    @property
    def last(self) -> int:
        """The newest batch."""
        return max(self.states, default=-1)

    @property
    def operators(self) -> dict[str, str]:
        """The operators' identities, by their names."""
        return {self.names[identity]: identity for identity in self.states.get(self.last, {})}

    # ---- Spark ----

    def offer(self, batch: int, time_ms: int) -> None:
        """Spark begins a batch, for the first time or again."""
        path = self.checkpoint / "offsets" / str(batch)
        if not path.exists():
            self.times[batch] = BatchTime(time_ms, 0)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("v1\n" + json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": time_ms}) + '\n{"value":0}')

    def commit(self, batch: int) -> None:
        """Spark notes that a batch is over."""
        path = self.checkpoint / "commits" / str(batch)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("v1\n{}")
        (self.checkpoint / "metadata").write_text(json.dumps({"id": self.query_id}))

    # ---- Starts ----

    def start(self, uids: list[str], parallelism: int) -> None:
        operators = [by_uid(uid, self.options).operator for uid in uids]
        self.runner.start(operators, parallelism, self.last + 1, keep_local=False)

    def look(self, parallelism: int) -> None:
        """Start the query and compare the state that its tasks find; they die before they ack."""
        operators, expected = self.operators, self.states.get(self.last, {})
        if not operators:
            return
        self.start(list(operators), parallelism)
        self.times.setdefault(self.last + 1, BatchTime(0, 0))
        for uid, identity in operators.items():
            assert self._seen(uid) == expected[identity], (self.root.name, uid)
        self.runner.release()

    def _seen(self, uid: str) -> State:
        held, batch, found = by_uid(uid, self.options), self.last + 1, dict[Any, list[str]]()
        data: Any = (
            command_rows(held, [(key, ("read",)) for key in KEYS])
            if isinstance(held, KeyedQuery)
            else held.data([], [])
        )
        SEEN.clear()
        parts = self.runner.operators[uid].split(data, self.runner.parallelism[uid], self.runner.time_of(batch).time_ms)
        for subtask, part in enumerate(parts):
            self.runner.crash_points[uid].arm(Step.ACKING)
            with pytest.raises(Crash):
                self.runner.run_subtask(uid, batch, subtask, part)
        for text in SEEN:
            key, elements = json.loads(text)
            found.setdefault(key if key is None else tuple(key), []).extend(elements)
        return {key: sorted(elements) for key, elements in found.items() if elements}

    # ---- From outside ----

    def read(self, uid: str, at: str | None = None) -> State:
        """An operator's state, read from the files alone."""
        is_keyed, found = uid.startswith("k"), dict[Any, list[str]]()
        table = statelog.read_state(self.location, uid, state="list" if is_keyed else "words", at=at).read_all()
        for row in table.to_pylist():
            key = (row["key_a"], row["key_b"]) if is_keyed else None
            found.setdefault(key, []).append(row["value_field" if is_keyed else "value_word"])
        return {key: sorted(elements) for key, elements in found.items()}

    @property
    def stored_pins(self) -> dict[str, Pin]:
        store = LocalStore(self.location)
        found = {info.name: read_pin(store, info.name) for info in store.list("pins/")}
        return {name: pin for name, pin in found.items() if pin is not None and pin.lasts_s is None}


class Family:
    """A query, its branches and theirs, which a seed lets go through random moves."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        self.count = self.elements = self.time_ms = 0
        first = Branch(directory / "0", "query", self.new_options())
        self.branches = [first]
        self.moves: list[str] = []
        self.run(first)

    def new_options(self) -> Options:
        return Options(
            file_merging=self.random.choice(["across", "within"]),
            inline_budget_bytes=self.random.choice([0, 0, 8 << 20]),
            retained_checkpoints=self.random.choice([2, 4]),
            materialization_interval_s=0,
            tuning=Tuning(max_log_to_base=0, merge_fan_in=2, max_file_bytes=4000, log_min_age_s=0, orphan_min_age_s=0),
        )

    def step(self) -> None:
        """One move, after which everything is looked at."""
        moves: list[Callable[[Branch], str | None]] = [
            *[self.run] * 5,
            *[self.branch] * 2,
            *[self.rename, self.forget, self.rewind] * 2,
            *[self.fall_back, self.lack, self.pin, self.pin, self.unpin, self.drop],
            *[self.gc] * 3,
        ]
        while (told := self.random.choice(moves)(query := self.random.choice(self.branches))) is None:
            pass
        self.moves.append(f"{query.root.name}: {told}")

    def check(self) -> None:
        """Every query can be verified, read and started, and pins stand as long as they are needed."""
        for query in self.branches:
            if query.operators:
                assert statelog.verify(query.location).damages == ()
                assert query.history.names == query.operators
            for uid, identity in query.operators.items():
                assert query.read(uid) == query.states[query.last][identity], (query.root.name, uid)
            self.check_pins(query)
        for query in self.branches:
            query.look(self.random.choice([1, 2, 3]))

    def check_pins(self, query: Branch) -> None:
        pins, names = query.stored_pins, query.history
        assert query.pinned.keys() == {name for name, pin in pins.items() if not pin.branch}
        for name, (batch, states) in query.pinned.items():
            pin = pins[name]
            assert pin.batch == batch
            present = {one.identity: names.name_of(one.identity) or one.uid for one in pin.operators}
            for identity, uid in present.items():
                if list(present.values()).count(uid) == 1:
                    assert query.read(uid, name) == states[identity], (query.root.name, name, uid)
        here = {branch.location: branch for branch in self.branches}
        for name, pin in pins.items():
            if pin.branch in here:
                parent = here[pin.branch].history.parent
                assert parent is not None, f"{query.root.name}: {name} is needed no more"
                assert parent.pin == name
        parent = query.history.parent
        if parent is not None:
            assert parent.pin in here[parent.location].stored_pins, f"{query.root.name} needs its parent"

    # ---- Moves ----

    def run(self, query: Branch) -> str:
        """Some batches in a new start, perhaps with an operator more."""
        uids = list(query.operators)
        if len(uids) < 3 and self.random.random() < (0.4 if uids else 1):
            uids.append(self.random.choice([name for name in NAMES if name not in uids]))
        query.start(uids, self.random.choice([1, 2, 3]))
        batches = self.random.choice([1, 1, 2, 8])
        for _ in range(batches):
            self._batch(query, uids)
        if self.random.random() < 0.7:
            query.runner.stop()
        return f"run {uids} {batches}"

    def _batch(self, query: Branch, uids: list[str], lacking: str = "") -> None:
        batch = query.last + 1
        self.time_ms += 10
        query.offer(batch, self.time_ms)
        added: dict[str, State] = {}
        for uid in uids:
            if uid == lacking:
                continue
            held, new = by_uid(uid, query.options), added.setdefault(uid, {})
            data: Any
            if isinstance(held, KeyedQuery):
                for key in self.random.sample(KEYS, self.random.choice([1, 2, len(KEYS)])):
                    new[key] = [self._element()]
                data = command_rows(held, [(key, ("append", *elements)) for key, elements in new.items()])
            else:
                new[None] = [self._element()]
                data = held.data([(element,) for element in new[None]], [])
            query.runner.run_operator(uid, batch, data)
        query.commit(batch)
        if lacking:
            return
        names = query.history.names
        before = query.states.get(batch - 1, {})
        query.names.update({identity: uid for uid, identity in names.items()})
        query.states[batch] = {identity: _with(before.get(identity, {}), added[uid]) for uid, identity in names.items()}

    def _element(self) -> str:
        self.elements += 1
        return str(self.elements)

    def lack(self, query: Branch) -> str | None:
        """An operator does not come to the end of a batch that Spark commits; the query is set back."""
        uids = list(query.operators)
        if len(uids) < 2:
            return None
        query.start(uids, 2)
        self._batch(query, uids, lacking=uids[-1])
        query.runner.release()
        query.offer(query.last + 2, self.time_ms + 5)
        with pytest.raises(StateMissingError):
            query.runner.start([by_uid(uid, query.options).operator for uid in uids], 1, query.last + 2)
        done = statelog.rewind(query.checkpoint)
        assert (done.next_batch, done.taken_back) == (query.last + 1, [query.last + 1])
        return "lack"

    def branch(self, query: Branch) -> str | None:
        retained = self._retained(query)
        if len(self.branches) == MOST_QUERIES or not query.operators or not retained:
            return None
        self.count += 1
        at = self.random.choice([None, *retained])
        if at is not None and not query.states[at]:
            return None
        # Entries with links are of any length: where they end in a sector has mattered.
        root = self.directory / ("x" * self.random.randrange(200)) / str(self.count)
        made = statelog.branch(query.checkpoint, root / "checkpoint", at=at)
        last = made.next_batch - 1
        states = {batch: dict(held) for batch, held in query.states.items() if batch <= last}
        times = {batch: time for batch, time in query.times.items() if batch <= last}
        names = {identity: query.names[identity] for identity in states[last]}
        new = Branch(root, made.query_id, self.new_options(), states, names, times=times)
        self.branches.append(new)
        return f"branch {self.count} at {last}"

    def _retained(self, query: Branch) -> list[int]:
        """The checkpoints that the query can go back to."""
        history, committed = query.history, {int(path.name) for path in (query.checkpoint / "commits").glob("[0-9]*")}
        return [batch for batch in query.states if history.has_batch(batch) and batch in committed]

    def rename(self, query: Branch) -> str | None:
        operators = query.operators
        free = [name for name in NAMES if name not in operators]
        pairs = [(old, new) for old in operators for new in free if old[0] == new[0]]
        if not pairs:
            return None
        old, new = self.random.choice(pairs)
        statelog.rename(query.checkpoint, old, new)
        query.names[operators[old]] = new
        return f"rename {old} {new}"

    def forget(self, query: Branch) -> str | None:
        operators = query.operators
        if not operators or (len(operators) == 1 and self.random.random() < 0.7):
            return None
        uid = self.random.choice(list(operators))
        statelog.forget(query.checkpoint, uid)
        for states in query.states.values():
            states.pop(operators[uid], None)
        return f"forget {uid}"

    def rewind(self, query: Branch) -> str | None:
        retained = [batch for batch in self._retained(query) if batch < query.last]
        if not retained:
            return None
        to = self.random.choice(retained)
        done = statelog.rewind(query.checkpoint, to=to)
        assert done.next_batch == to + 1
        self._went_back(query, to)
        return f"rewind {to}"

    def _went_back(self, query: Branch, to: int) -> None:
        for batch in [batch for batch in query.states if batch > to]:
            del query.states[batch]
        for batch in [batch for batch in query.times if batch > to + 1]:
            del query.times[batch]

    def fall_back(self, query: Branch) -> str | None:
        """An object is damaged that only the newest checkpoint needs, and no pin."""
        history = query.history
        if query.last - 1 not in self._retained(query) or query.last not in self._retained(query):
            return None
        newest, before = (_needed(history, batch) for batch in (query.last, query.last - 1))
        pinned = {name for pin in query.stored_pins.values() for name in pin.objects}
        own = sorted(name for name in newest - before - pinned if folder_of(name) == "changes")
        if not own:
            return None
        (Path(query.location) / self.random.choice(own)).write_bytes(b"damaged")
        done = statelog.fall_back(query.checkpoint)
        if not done.damages:
            return "fall_back from nothing"  # an object without rows is never read
        assert done.next_batch == query.last
        self._went_back(query, query.last - 1)
        return f"fall_back {query.last}"

    def pin(self, query: Branch) -> str | None:
        retained = [batch for batch in self._retained(query) if query.states[batch]]
        if not retained:
            return None
        at = self.random.choice(retained)
        info = statelog.pin(query.location, at=at, lasts_s=None, owner="test")
        query.pinned[info.name] = at, dict(query.states[at])
        return f"pin {at}"

    def unpin(self, query: Branch) -> str | None:
        if not query.pinned:
            return None
        name = self.random.choice(list(query.pinned))
        statelog.unpin(query.location, name)
        del query.pinned[name]
        return f"unpin {name}"

    def gc(self, query: Branch) -> str:
        """Collect garbage and release the pins of deleted branches."""
        statelog.delete_orphans(query.location, min_age_s=0, release=True, clock=ManualClock(2e10))
        here = {branch.location for branch in self.branches}
        assert {pin.branch for pin in query.stored_pins.values()} <= {"", *here}
        return "gc"

    def drop(self, query: Branch) -> str | None:
        """Remove a branch that has no branches."""
        needed = {parent.location for one in self.branches if (parent := one.history.parent) is not None}
        if query is self.branches[0] or query.location in needed or self.random.random() < 0.5:
            return None
        shutil.rmtree(query.root)
        self.branches.remove(query)
        return "drop"


def _needed(history: QueryHistory, batch: int) -> set[str]:
    """All objects that a checkpoint needs, besides the log."""
    records = [(one, record) for one in history.histories_at(batch) if (record := one.record(batch)) is not None]
    return set().union(*(needed_objects(one, record) for one, record in records))


def _with(state: State, added: State) -> State:
    """A state with more elements."""
    return {key: sorted([*state.get(key, []), *added.get(key, [])]) for key in state.keys() | added.keys()}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(4, 60))]
)
def test_nothing_is_lost_whatever_tools_do_to_a_query_and_its_branches(tmp_path: Path, seed: int) -> None:
    family = Family(tmp_path, seed)
    try:
        for _ in range(MOVES):
            family.step()
            family.check()
    except BaseException as error:
        error.add_note("\n".join(family.moves))
        raise
