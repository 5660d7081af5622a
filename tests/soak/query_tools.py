"""What others do beside a query of the queries lane: they read, follow its changes, pin, branch and collect garbage.

Each is a process of its own, which may be killed. What they find is compared with the query's model.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

import statelog
from statelog import ConfigurationError, PinExpiredError, StateMissingError
from statelog.errors import ErrorKind
from statelog.reading.changes import changed_rows
from statelog.reading.consumer import OWNER, ChangeConsumer, Position
from statelog.reading.open import open_logged
from tests.model.query_engine import SparkNotes
from tests.model.query_graph import State, operator_of
from tests.soak.processes import Died, Remote, first_answer
from tests.soak.report import Difference

STATE: Final = "statelog"
"""The folder of the state in a checkpointLocation."""
_OLD_S: Final = 600.0
"""Older than anything in a life: what is just being made stays."""

States = Mapping[str, State]
Followed = tuple[Position, list[tuple[int, State]]]
"""How far a consumer has come, and what each batch on the way has changed."""


# ---- The processes ----


class QueryTool:
    """Works on a query from outside."""

    def read(self, location: str, uid: str, at: int | str) -> State | None:
        """The state of an operator in a checkpoint, or in a pinned one; None if it is no longer there."""
        try:
            return operator_of(uid).stored(location, at)
        except (PinExpiredError, StateMissingError):
            return None

    def verify(self, location: str) -> str:
        """What is damaged; empty if nothing is."""
        damages = statelog.verify(location).damages
        return f"{damages}" if damages else ""

    def collect(self, location: str, min_age_s: float) -> int:
        """Delete orphans, and release the pins of branches that are gone; return how many objects were deleted."""
        return len(statelog.delete_orphans(location, min_age_s=min_age_s, release=True))

    def pin(self, location: str, lasts_s: float | None) -> str:
        """Pin the newest checkpoint; return the pin's name, or nothing if the checkpoint is gone already."""
        try:
            return statelog.pin(location, lasts_s=lasts_s, owner="soak").name
        except PinExpiredError:
            return ""

    def branch(self, checkpoint: str, new: str) -> tuple[str, int]:
        """Make a branch of the newest batch; return its query id and its first batch."""
        made = statelog.branch(checkpoint, new)
        return made.query_id, made.next_batch

    def rewind(self, checkpoint: str, to: int) -> int:
        """Take back the batches after one; return the batch that comes next."""
        return statelog.rewind(checkpoint, to=to).next_batch

    def rename(self, checkpoint: str, old: str, new: str) -> None:
        """Rename an operator; done already is fine, as a process that did it was killed."""
        try:
            statelog.rename(checkpoint, old, new)
        except ConfigurationError:
            names = {one.uid for one in statelog.list_checkpoints(str(Path(checkpoint, STATE)))}
            if old in names or new not in names:
                raise

    def follow(
        self, location: str, uid: str, since: Position | None
    ) -> tuple[Position, list[tuple[int, State]]] | None:
        """Follow the changes of an operator from a position on, or from the newest batch; None if they are gone."""
        try:
            consumer = ChangeConsumer(
                location, open_logged(location, uid, None), "held", pin_s=_OLD_S, max_bytes=1 << 30
            )
            if since is None:
                return consumer.first(consumer.newest(None).batch), []
            end = consumer.newest(since)
            found: dict[int, dict[int, int]] = {}
            if end != since:
                store, state, table = consumer.point.store, consumer.state, consumer.table
                for own in consumer.changes(since, end):
                    batches = ((changes, changes.rows(store, state)) for changes in own)
                    for rows in changed_rows(store, state, table, batches, None):
                        for row in rows.to_pylist():
                            found.setdefault(row["batch"], {})[row["key_key"]] = row["value_field"]
        except (StateMissingError, PinExpiredError):
            return None
        except ConfigurationError as error:
            if error.kind != ErrorKind.UNSUPPORTED_FEATURE:
                raise
            return None  # a run had no changelog
        return end, sorted(found.items())


# ---- The model ----


@dataclass
class QueryModel:
    """A query in its checkpointLocation, and what must be stored there."""

    notes: SparkNotes
    uids: list[str]
    states: dict[int, States] = field(default_factory=lambda: {-1: {}})
    """The states after each batch on the line."""
    lost: dict[int, States] = field(default_factory=dict)
    """Those of batches that Spark has not committed, as they were the last time."""
    most_lost: int = -1
    """Batches up to this one were planned anew, some perhaps several times."""
    retained: int = 0
    """How many checkpoints can be gone back to, at least."""
    time_ms: int = 1000
    pinned: dict[str, tuple[int, States]] = field(default_factory=dict)
    """What each pin keeps, whether its checkpoint was taken back since or not."""
    lasting: set[str] = field(default_factory=set)
    """The pins that do not expire."""
    parent: QueryModel | None = None
    followed: dict[str, Position] = field(default_factory=dict)
    """How far a consumer of each operator has come."""
    replaced: set[str] = field(default_factory=set)
    """The operators whose consumer is at a batch that was taken back."""
    unkept: int = -1
    """The newest batch whose changes a consumer may miss: it ran without a changelog, or pins were thought expired."""

    @property
    def location(self) -> str:
        """Where the state is."""
        return str(self.notes.folder / STATE)

    def note_pins(self, batch: int, states: States) -> None:
        """Note what new pins keep after a batch, before another one can take its place."""
        found = {one.name: one for one in statelog.list_pins(self.location) if not one.owner.startswith(OWNER)}
        for name in found.keys() - self.pinned.keys():
            pinned = found[name]
            if pinned.is_on_line:
                known = self.states | {batch: states}
            elif batch in self.lost or pinned.batch <= self.most_lost:
                continue  # that of an earlier try of the batch, or of the one before
            else:
                known = self.lost | {batch: states}
            if pinned.batch in known:
                self.pinned[name] = pinned.batch, known[pinned.batch]
        for gone in self.pinned.keys() - found.keys():
            if gone in self.lasting:
                raise Difference(f"{gone} is gone, and was to stay")
            del self.pinned[gone]

    def go_back(self, to: int) -> None:
        """Forget the batches after one."""
        # Consumers of these batches have to start over.
        self.replaced |= {uid for uid, position in self.followed.items() if position.batch > to}
        self.retained -= max(self.states) - to
        self.states = {of: states for of, states in self.states.items() if of <= to}

    def lose_commits(self, to: int) -> None:
        """Forget the batches after the last stored commit, which are planned anew."""
        for uid, position in self.followed.items():
            if position.batch > to:
                raise Difference(f"a consumer of {uid} was given batch {position.batch}, and Spark goes back to {to}")
        self.most_lost = max(self.most_lost, max(self.states) + 2)  # a start that was cut off goes on
        self.retained = max(1, self.retained - (max(self.states) - to))
        self.states = {of: states for of, states in self.states.items() if of <= to}

    def branched(self, notes: SparkNotes, first_batch: int) -> QueryModel:
        """The model of a branch."""
        states = {of: states for of, states in self.states.items() if of < first_batch}
        return QueryModel(notes, self.uids, states, retained=1, time_ms=self.time_ms, parent=self, unkept=self.unkept)


# ---- What they do ----


class Outsiders:
    """Those who work on a query from outside, one at a time beside its batches."""

    def __init__(self, counts: Counter[str], moves: Callable[[str], None]) -> None:
        self._counts = counts
        self._note = moves
        self._tool: Remote | None = None

    def close(self) -> None:
        """End their process."""
        if self._tool is not None:
            self._tool.end()
            self._tool = None

    def begin(self, query: QueryModel, rng: Random) -> Callable[[], None]:
        """Begin something while a batch runs; the result ends it, and compares what was found."""
        newest = max(query.states)
        if newest < 0 or rng.random() < 0.6:
            return lambda: None
        uid = rng.choice(query.uids)
        keyed = [one for one in query.uids if "total" not in one]
        match rng.randrange(8):
            case 0 | 1:
                at = rng.choice([newest, rng.choice(list(query.states)[1:])])
                return self._do_read(query, uid, at)
            case 2 if query.pinned:
                return self._do_read(query, uid, rng.choice(list(query.pinned)))
            case 3:
                return self._do("verify", partial(self._require_whole, query), query.location)
            case 4:
                return self._do("collect", self._count_collected, query.location, 0.0)
            case 5:
                lasts_s = rng.choice([1e-3, _OLD_S, None])
                return self._do("pin", partial(self._note_pin, query, lasts_s), query.location, lasts_s)
            case _ if keyed:
                uid = rng.choice(keyed)
                since = query.followed.get(uid)
                return self._do("follow", partial(self._compare_changes, query, uid, since), query.location, uid, since)
        return lambda: None

    def branch(self, query: QueryModel, new: Path, rng: Random) -> QueryModel | None:
        """Make a branch beside a query that collects garbage; None if the process was killed, and nothing is left."""
        notes, tool, other = SparkNotes(new, ""), Remote(QueryTool), Remote(QueryTool)
        try:
            tool.ask("branch", str(query.notes.folder), str(new))
            other.ask("collect", query.location, _OLD_S)
            if rng.random() < 0.3 and first_answer([tool], rng.uniform(0, 0.05)) is None:
                tool.kill()
            query_id, first_batch = tool.answer()
            other.answer()
        except Died:
            self._counts["kills of tools"] += 1
            shutil.rmtree(new, ignore_errors=True)
            return None
        finally:
            tool.end()
            other.end()
        self._counts["branches"] += 1
        return query.branched(SparkNotes(notes.folder, query_id), first_batch)

    def until_done(self, rng: Random, method: str, *arguments: Any) -> Any:
        """Have a process do something, again and again until it survives."""
        while True:
            tool = Remote(QueryTool)
            try:
                tool.ask(method, *arguments)
                if rng.random() < 0.3 and first_answer([tool], rng.uniform(0, 0.05)) is None:
                    tool.kill()
                    self._counts["kills of tools"] += 1
                return tool.answer()
            except Died:
                self._note(f"  the process that was to {method} was killed, and starts over")
            finally:
                tool.end()

    def read(self, query: QueryModel, uid: str, at: int | str) -> None:
        """Read a state at once, and compare."""
        self._do_read(query, uid, at)()

    def _do_read(self, query: QueryModel, uid: str, at: int | str) -> Callable[[], None]:
        if isinstance(at, str):
            states, must_be = query.pinned[at][1], at in query.lasting
        else:
            states, must_be = query.states[at], at == max(query.states)
        compare = partial(self._compare, f"{uid} at {at}", states.get(uid), must_be)
        return self._do("read", compare, query.location, uid, at)

    def _do(self, method: str, compare: Callable[[Any], None], *arguments: Any) -> Callable[[], None]:
        if self._tool is None:
            self._tool = Remote(QueryTool)
        tool = self._tool
        tool.ask(method, *arguments)
        self._note(f"meanwhile: {method} {arguments[1:]}")
        return lambda: compare(tool.answer())

    # ---- Comparisons ----

    def _compare(self, of: str, expected: State | None, must_be: bool, found: State | None) -> None:
        if found is None:
            if must_be:
                raise Difference(f"{of} cannot be read")
            return
        self._counts["reads from outside"] += 1
        if expected is not None and found != expected:
            raise Difference(f"{of} is {found}, not {expected}")

    def _require_whole(self, query: QueryModel, damages: str) -> None:
        if damages:
            raise Difference(f"{query.location} is damaged: {damages}")
        self._counts["verifications"] += 1

    def _count_collected(self, count: int) -> None:
        self._counts["deletions by hand"] += 1
        self._counts["orphans deleted by hand"] += count

    def _note_pin(self, query: QueryModel, lasts_s: float | None, made: str) -> None:
        if lasts_s is None and made:
            query.lasting.add(made)
        self._counts["pins"] += 1

    def _compare_changes(
        self,
        query: QueryModel,
        uid: str,
        since: Position | None,
        found: Followed | None,
    ) -> None:
        if found is None:
            if since is not None and uid not in query.replaced and since.batch >= query.unkept:
                raise Difference(f"the changes of {uid} since batch {since.batch} are gone")
            query.followed.pop(uid, None)
            query.replaced.discard(uid)
            return
        if uid in query.replaced:
            raise Difference(f"a consumer of {uid} continues from a batch that was taken back: {found}")
        end, changes = found
        query.followed[uid] = end
        if since is None:
            return
        state = dict(query.states[since.batch].get(uid, {}))
        for batch, changed in changes:
            state |= changed
            expected = query.states[batch][uid]
            if state != expected:
                raise Difference(f"{uid} after the changes of batch {batch} is {state}, not {expected}")
        if state != query.states[end.batch].get(uid, {}):
            raise Difference(f"changes of {uid} up to batch {end.batch} are missing")
        self._counts["batches followed"] += end.batch - since.batch
