"""Finds the operators of a query, and their logs.

A checkpoint notes all operators of the start that wrote it, as :class:`~statelog.log.entry.QueryOperators`. So any
operator's log leads to the others, even to those with a location of their own. The note also distinguishes an operator
that the query has dropped from one whose checkpoint is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from statelog.checkpoint.history import History
from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, ErrorKind
from statelog.log.entry import Checkpoint, Claim, Fence, QueryOperators, gave_up, renamed_to
from statelog.log.open import LOG_FOLDER, open_log, operator_folder
from statelog.options import Options
from statelog.storage import Store
from statelog.storage.location import scheme_of
from statelog.storage.open import is_same_place


@dataclass(frozen=True)
class OperatorLog:
    """An operator's checkpoints, and where they are."""

    uid: str
    location: str
    root: str
    """The operator's folder in the location."""
    history: History
    runs: frozenset[str] = frozenset()
    """Spark's run ids of the starts that it is known to have taken part in."""

    @property
    def newest(self) -> int:
        """The batch of its newest checkpoint."""
        assert self.history.latest is not None, "logs without a checkpoint are of no query"
        return self.history.latest.batch

    @property
    def name(self) -> str:
        """The operator's name in messages."""
        return f"operator '{self.uid}' at {self.location}/{self.root}"


@dataclass(frozen=True)
class BatchOperators:
    """The operators that a query has as of a batch."""

    operators: list[OperatorLog]
    """Those with a log, in order of uid, with or without the batch's checkpoint."""
    missing: dict[str, str]
    """Locations that should hold the state of the others and hold none of this query, by uid."""
    former: list[OperatorLog]
    """Operators that the query had before, and dropped."""
    is_noted: bool
    """Whether a checkpoint notes the operators; otherwise they are a guess."""


@dataclass
class QueryLogs:
    """The logs of a query's operators."""

    query_id: str
    home: str
    """The location below the query's checkpointLocation."""
    given: str | None
    """The location that the user has passed; its logs go before all others."""
    open_location: Callable[[str], Store]
    found: list[OperatorLog] = field(default_factory=list)
    """The logs known so far."""
    given_up: set[str] = field(default_factory=set)
    """Uids of the known logs that have no checkpoint because the state was given up."""
    renamed: dict[str, str] = field(default_factory=dict)
    """New uids of the operators of such logs, by the old ones."""

    @staticmethod
    def read(query_id: str, home: str, given: str | None, open_location: Callable[[str], Store]) -> QueryLogs:
        """Look for a query's operators in the location below its checkpointLocation and in a given one.

        Raises CorruptionError or StorageError if a log cannot be read.
        """
        logs = QueryLogs(query_id, home, given, open_location)
        for location in dict.fromkeys([home] if given is None else [given, home]):
            logs.look_at(location)
        return logs

    def look_at(self, location: str) -> None:
        """Read the logs of the query's operators in a location."""
        store = self.open_location(location)
        for root in operators_of(store):
            self._add(store, location, root)

    def newest(self, up_to: int | None = None) -> int | None:
        """The newest batch with a checkpoint of any operator, among those up to `up_to`."""
        batches = (checkpoint.batch for log in self.found for checkpoint in log.history.checkpoints)
        return max((batch for batch in batches if up_to is None or batch <= up_to), default=None)

    def at(self, batch: int, time_ms: int | None = None) -> BatchOperators:
        """The operators that the query has as of a batch with a checkpoint; reads further logs that checkpoints name.

        `time_ms` is Spark's time of the batch: checkpoints of another time are from a start whose batches were taken
        back. Raises CorruptionError or StorageError if a log cannot be read.
        """
        while True:
            noted = _newest_note([log.history.at(batch) for log in self.found], time_ms)
            if noted is None:
                return self._without_note(batch)
            places = self.present(noted)
            unknown = [uid for uid, place in places.items() if not self._has(uid, place)]
            if not any([self._look_up(uid, places[uid]) for uid in unknown]):
                break
        chosen = {uid: self._chosen(uid, place) for uid, place in sorted(places.items())}
        return BatchOperators(
            operators=[log for log in chosen.values() if log is not None],
            missing={uid: places[uid] for uid, log in chosen.items() if log is None and uid not in self.given_up},
            former=[log for log in self.found if log.uid not in places],
            is_noted=True,
        )

    def present(self, noted: QueryOperators) -> dict[str, str]:
        """The locations of noted operators by their present uids."""
        places: dict[str, str] = {}
        for uid, location in noted.locations.items():
            for _ in self.renamed:
                uid = self.renamed.get(uid, uid)
            places[uid] = location or self.home
        return places

    def of(self, uid: str) -> OperatorLog | None:
        """The log of an operator, if one is known."""
        return self._chosen(uid, self.home)

    def _without_note(self, batch: int) -> BatchOperators:
        """A guess from older checkpoints, without notes.

        It rests on the rule that a query cannot begin a batch while an operator lacks the previous checkpoint.
        """
        uids = sorted({log.uid for log in self.found})
        chosen = [log for uid in uids if (log := self._chosen(uid, self.home)) is not None]
        return BatchOperators(
            operators=[log for log in chosen if log.newest >= batch - 1],
            missing={},
            former=[log for log in chosen if log.newest < batch - 1],
            is_noted=False,
        )

    def _has(self, uid: str, location: str) -> bool:
        return any(log.uid == uid and is_same_place(log.location, location) for log in self.found)

    def _look_up(self, uid: str, location: str) -> bool:
        store = self.open_location(location)
        return self._add(store, location, operator_folder(store, uid), uid)

    def _add(self, store: Store, location: str, root: str, uid: str | None = None) -> bool:
        """Read a log; return whether it belongs to the query, and to operator `uid` if given."""
        entries = open_log(store, root, Options(), SystemClock()).read()
        history = History(entries)
        latest = history.latest
        if latest is None and gave_up(entries, self.query_id):
            uids = {entry.uid for entry in entries if isinstance(entry, Claim)}
            self.given_up |= uids
            if new_uid := renamed_to(entries, self.query_id):
                self.renamed |= dict.fromkeys(uids, new_uid)
        if latest is None or latest.query_id != self.query_id or uid not in (None, latest.uid):
            return False
        runs = frozenset(entry.run_id for entry in entries if not isinstance(entry, Fence))
        self.found.append(OperatorLog(latest.uid, location, root, history, runs))
        return True

    def _chosen(self, uid: str, noted: str) -> OperatorLog | None:
        """An operator's log. Of several copies: the one at the given location, else the one at the noted location."""
        own = [log for log in self.found if log.uid == uid]
        for wanted in (self.given, noted):
            for log in own:
                if wanted is not None and is_same_place(log.location, wanted):
                    return log
        return own[0] if own else None


@dataclass(frozen=True)
class OperatorChanges:
    """Finds out whether a start of a query has added operators, or removed some, from the notes in checkpoints."""

    query_id: str
    home: str
    """The location below the query's checkpointLocation."""
    locations: Mapping[str, str]
    """Those of the operators that the start has, by uid."""
    open_location: Callable[[str], Store]

    def has_added(self, uid: str, batch: int, time_ms: int | None, name: str) -> bool:
        """Whether a checkpoint of a batch notes the query's operators, and `uid` is none of them.

        `time_ms` is Spark's time of the batch; None if Spark has forgotten it. Raises as :meth:`require_none_removed`,
        because an operator that has another uid now seems to be added too.
        """
        logs = QueryLogs(self.query_id, self.home, None, self.open_location)
        for location in dict.fromkeys(self.locations.values()):
            logs.look_at(location)
        noted = _newest_note([log.history.at(batch) for log in logs.found], time_ms)
        locations = {} if noted is None else logs.present(noted)
        if not locations or uid in locations:
            return False
        self._require_all(locations, batch, name)
        return True

    def require_none_removed(self, before: Checkpoint, name: str) -> None:
        """Raise ConfigurationError if the query had an operator whose state this start would silently leave behind.

        `before` is a checkpoint of the batch before the start's first one, and `name` is its operator. Operators whose
        state was given up may be missing. Raises CorruptionError or StorageError if a log cannot be read.
        """
        if before.operators is not None:
            noted = before.operators.locations
            self._require_all({uid: place or self.home for uid, place in noted.items()}, before.batch, name)

    def _require_all(self, noted: Mapping[str, str], batch: int, name: str) -> None:
        for uid in sorted(noted.keys() - self.locations.keys()):
            present = self._present_uid(uid, noted[uid])
            if present is None or present in self.locations:
                continue
            raise ConfigurationError(
                f"{name}: at batch {batch} the query also had an operator '{uid}', whose state is at {noted[uid]};"
                + (
                    " this start lacks it."
                    if present == uid
                    else f" it was renamed to '{present}', which this start lacks."
                ),
                kind=ErrorKind.OPERATOR_REMOVED,
                hint=f"Was the uid changed? Use '{present}', or statelog.rename. To go on without the operator,"
                f" stop the query and give its state up: statelog.forget(checkpointLocation, '{present}').",
            )

    def _present_uid(self, uid: str, location: str) -> str | None:
        """The uid under which an operator goes on: its own unless it was renamed; None if its state was given up."""
        store = self.open_location(location)
        seen: set[str] = set()
        while uid and uid not in seen:  # Folders from older copies may lead round in a circle.
            seen.add(uid)
            entries = open_log(store, operator_folder(store, uid), Options(), SystemClock()).read()
            if not gave_up(entries, self.query_id) or History(entries).latest is not None:
                break
            uid = renamed_to(entries, self.query_id)
        return uid or None


def noted_location(location: str | None) -> str:
    """A location as checkpoints note it: independent of the driver's folder, and empty for the query's own."""
    if location is None:
        return ""
    return location if scheme_of(location) else os.path.abspath(location)


def _newest_note(checkpoints: Sequence[Checkpoint | None], time_ms: int | None) -> QueryOperators | None:
    """The note of the newest start among those that wrote these checkpoints of a batch."""
    notes = [
        checkpoint.operators
        for checkpoint in checkpoints
        if checkpoint is not None and checkpoint.operators is not None
        if time_ms is None or checkpoint.batch_time_ms == time_ms
    ]
    return max(notes, key=lambda note: note.started_ms, default=None)


def operators_of(store: Store) -> list[str]:
    """Folders of the operators that have a log in a store."""
    names = (info.name.split("/") for info in store.list())
    # Deeper folders may hold anything, such as a savepoint with a state named log.
    return sorted({parts[0] for parts in names if len(parts) == 3 and parts[1] == LOG_FOLDER})
