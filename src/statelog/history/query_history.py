"""The checkpoints of a query: the line of history that counts, and each operator's sections on it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from statelog.clock import SystemClock
from statelog.errors import CorruptionError, ErrorKind
from statelog.history.operator_history import History, Record
from statelog.log.entry import INITIAL_BATCH, Checkpoint, Claim, Cut, Entry, EntryPlace, Parent, QueryCheckpoint
from statelog.log.open import open_log
from statelog.log.references import StoredRun
from statelog.options import Options
from statelog.storage import Store

_START: Final = EntryPlace(0, 0)


@dataclass
class Line:
    """The entries of a log that count now, and what is known about those that do not.

    Each checkpoint follows another one. A start that repeats a batch, a revision, and a claim that goes back to an
    earlier checkpoint take back what comes after it. The line is what is left.
    """

    entries: list[QueryCheckpoint] = field(default_factory=list)
    """Oldest first, of successive batches."""
    cuts: list[Cut] = field(default_factory=list)
    """What was taken back: the entries before a cut's place of batches after its batch. By batch and place."""
    retained_from: int = INITIAL_BATCH
    """The oldest batch whose files have not been given up, not even by an entry that was later taken back."""

    def add(self, entry: QueryCheckpoint, *, may_replace: bool = False) -> None:
        """Let a later entry count, in place of those of its own batch and of later ones.

        It `may_replace` an entry that is not known because its write was not seen to succeed.
        """
        if not self.entries:
            for cut in entry.cuts:
                self._note(cut)
            may_replace = True  # what it replaced may be deleted
        self.cut(entry.batch - 1, entry.place)
        if may_replace:
            self._note(Cut(entry.batch - 1, entry.place))
        self.entries.append(entry)
        self.retained_from = entry.retained_from

    def go_back(self, checkpoint_id: bytes, place: EntryPlace) -> None:
        """Let a checkpoint end the line, none if `checkpoint_id` is empty; a claim at `place` says so."""
        found = [entry.batch for entry in self.entries if entry.id == checkpoint_id]
        if found or not checkpoint_id:
            self.cut(found[-1] if found else INITIAL_BATCH, place)

    def cut(self, batch: int, place: EntryPlace) -> None:
        """Take back the entries of all batches after one; something at `place` in the log says so."""
        if not self.entries or self.entries[-1].batch <= batch:
            return
        while self.entries and self.entries[-1].batch > batch:
            self.entries.pop()
        self._note(Cut(batch, place))
        self.retained_from = min(self.retained_from, batch)

    def _note(self, cut: Cut) -> None:
        # A later cut at an earlier batch takes back everything that the former one does.
        self.cuts = [*(earlier for earlier in self.cuts if earlier.batch < cut.batch), cut]

    def drop_cuts(self, before: EntryPlace) -> None:
        """Forget what was taken back if nothing refers to an entry before `before` any more."""
        self.cuts = [cut for cut in self.cuts if before < cut.place]

    def at(self, batch: int) -> QueryCheckpoint | None:
        """The entry of a batch; None if there is none, or it is no longer known."""
        place = bisect_left(self.entries, batch, key=attrgetter("batch"))
        found = self.entries[place] if place < len(self.entries) else None
        return found if found is not None and found.batch == batch else None

    def has(self, batch: int, token: bytes, place: EntryPlace) -> bool:
        """Whether the entry of a batch with a token, at a place in the log, lies on the line."""
        known = self.at(batch)
        if known is not None:
            return known.token == token
        return not any(cut.batch < batch and place < cut.place for cut in self.cuts)


class QueryHistory:
    """The checkpoints of a query that can be restored, and the histories of its operators.

    An operator is known by its identity. Its name is the one in the newest entry that mentions it. An operator whose
    identity has ended has no history, on any line.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._line = Line()
        self._histories: dict[str, History] = {}
        self._names: dict[str, str] = {}
        self._ended: set[str] = set()
        self.begins_at: tuple[str, int] | None = None
        """The query whose state may begin with a batch, and that batch: a tool has allowed it, or it has begun."""
        self.parent: Parent | None = None
        """The parent that the newest entry names, on whichever line: it says what the location's files need."""
        for entry in entries:
            match entry:
                case Claim():
                    self._claimed(entry)
                case QueryCheckpoint():
                    self._line.add(entry)
                    self._note(entry)
                    self._ended |= set(entry.ended)
        for entry in self._line.entries:
            self._add_sections(entry)

    def _claimed(self, claim: Claim) -> None:
        self._names |= claim.renames
        self._ended |= set(claim.ended)
        is_own = self.latest is None or self.latest.query_id == claim.query_id
        if claim.follows is not None and is_own:
            self._line.go_back(claim.follows, EntryPlace(claim.number, 0))
        if claim.begins_at is not None and self.latest is None:
            self.begins_at = claim.query_id, claim.begins_at

    def add(self, entry: QueryCheckpoint, *, may_replace: bool = False) -> list[Record]:
        """Add a later entry; return the operators' records that it replaces, newest first.

        `may_replace` is that of :meth:`Line.add`.
        """
        replaced = [record for history in self._histories.values() for record in history.cut(entry.batch - 1)]
        self._line.add(entry, may_replace=may_replace)
        self._note(entry)
        self._add_sections(entry)
        return replaced

    def _note(self, entry: QueryCheckpoint) -> None:
        self.parent = entry.parent
        self._names |= {section.identity: section.uid for section in entry.sections}
        if not entry.follows:
            # If a query was given its state, its first checkpoint cannot be made again.
            is_begun = entry.retained_from < entry.batch
            self.begins_at = (entry.query_id, entry.batch) if is_begun else None

    def _add_sections(self, entry: QueryCheckpoint) -> None:
        if entry is self.latest:
            entry = replace(entry, retained_from=self.retained_from)
        inside = entry.inside
        for section in entry.sections:
            if section.identity not in self._ended:
                history = self._histories.setdefault(section.identity, History())
                history.add(Checkpoint.of(entry, section, self._names[section.identity], inside))

    def copy(self) -> QueryHistory:
        """The history as it is now."""
        copied = QueryHistory()
        copied._line = Line(list(self._line.entries), list(self._line.cuts), self._line.retained_from)
        copied._histories = {identity: history.copy() for identity, history in list(self._histories.items())}
        copied._names, copied._ended = dict(self._names), set(self._ended)
        copied.begins_at, copied.parent = self.begins_at, self.parent
        return copied

    # ---- The query's checkpoints ----

    @property
    def latest(self) -> QueryCheckpoint | None:
        """The newest checkpoint."""
        return self._line.entries[-1] if self._line.entries else None

    @property
    def retained_from(self) -> int:
        """The oldest batch that can be restored; files that only older ones need may be gone."""
        return self._line.retained_from

    @property
    def entries(self) -> Sequence[QueryCheckpoint]:
        """The checkpoints on the line, oldest first; also older ones that later ones build on."""
        return self._line.entries

    @property
    def cuts(self) -> Sequence[Cut]:
        """What was taken back, as the next entry has to say."""
        return self._line.cuts

    def at(self, batch: int) -> QueryCheckpoint | None:
        """The checkpoint of a batch; None if there is none."""
        return self._line.at(batch)

    def has_batch(self, batch: int) -> bool:
        """Whether the checkpoint of a batch exists and can be restored, for all operators."""
        entry = self.at(batch)
        return (
            entry is not None
            and batch >= self.retained_from
            and all(history.has_batch(batch) for history in self.histories_at(batch))
        )

    @property
    def oldest(self) -> QueryCheckpoint | None:
        """The oldest checkpoint that can be restored."""
        return next((entry for entry in self._line.entries if self.has_batch(entry.batch)), None)

    def has_on_line(self, batch: int, token: bytes, place: EntryPlace) -> bool:
        """Whether a stored reference to an entry means one that counts now, or did when it was deleted.

        It is the entry of a batch, with a token, at a place in the log.
        """
        return self._line.has(batch, token, place)

    def drop_cuts(self, before: EntryPlace) -> None:
        """Forget what was taken back if no reference to an entry before `before` is stored."""
        oldest = self._line.entries[0].place if self._line.entries else _START
        self._line.drop_cuts(min(before, oldest))

    # ---- Operators ----

    @property
    def histories(self) -> dict[str, History]:
        """The operators' histories, by identity, including operators that only older checkpoints have."""
        return self._histories

    def histories_at(self, batch: int) -> Iterator[History]:
        """The histories of the operators that the query has in the checkpoint of a batch, in order of their uids."""
        entry = self.at(batch)
        for section in () if entry is None else entry.sections:
            if section.identity in self._histories:
                yield self._histories[section.identity]

    def names_at(self, batch: int) -> dict[str, str]:
        """The operators that the query has in the checkpoint of a batch: their identities, by their present names."""
        entry = self.at(batch)
        return {
            self._names[section.identity]: section.identity
            for section in (() if entry is None else entry.sections)
            if section.identity not in self._ended
        }

    @property
    def names(self) -> dict[str, str]:
        """The operators that the query has in its newest checkpoint: their identities, by their present names."""
        return {} if self.latest is None else self.names_at(self.latest.batch)

    def of(self, uid: str) -> History | None:
        """The history of an operator that the query has in its newest checkpoint."""
        identity = self.names.get(uid)
        return None if identity is None else self._histories[identity]

    def name_of(self, identity: str) -> str | None:
        """The present name of an operator; None if no entry mentions it any more."""
        return self._names.get(identity)

    @property
    def ended(self) -> list[str]:
        """The identities that have ended, but of which entries still have sections, sorted."""
        if not self._ended:
            return []
        mentioned = {section.identity for entry in self._line.entries for section in entry.sections}
        return sorted(self._ended & mentioned)

    # ---- Retention ----

    def log_start(self, oldest: int, batch: int, changes_from: dict[str, int]) -> int | None:
        """The first log file with a needed entry, once the checkpoint of a batch is written; None if only that is.

        `oldest` is the oldest batch that a rewind can reach; for the operators in `changes_from`, the entries since a
        batch are needed, too.
        """
        starts = [
            start
            for identity, history in self._histories.items()
            if (start := history.log_start(oldest, batch, changes_from.get(identity))) is not None
        ]
        first = self._line.entries[0].batch if self._line.entries else batch
        kept = self._line.at(max(oldest, first))
        if kept is not None and kept.batch < batch:
            starts.append(kept.number)
        return min(starts, default=None)

    def settle(self, oldest: int) -> list[Record]:
        """The records up to the oldest that a rewind can reach; each is returned once."""
        return [record for history in self._histories.values() for record in history.settle(oldest)]

    def retain(self, oldest: int, changes_from: dict[str, int]) -> tuple[list[Record], list[StoredRun]]:
        """Drop checkpoints before a batch, unless later ones build on them; those of `changes_from` stay, too.

        Returns the operators' dropped records, and the materialized runs of operators that have left the query and have
        nothing left.
        """
        given_up: list[Record] = []
        left: list[StoredRun] = []
        for identity, history in list(self._histories.items()):
            last = history.latest_record
            given_up += history.retain(oldest, changes_from.get(identity))
            if history.latest is None:
                del self._histories[identity]
                ranges = last.base_map.ranges if last is not None and last.base_map is not None else ()
                left += [run for base_range in ranges for run in base_range.runs]
        firsts = [batch for history in self._histories.values() if (batch := history.first_batch) is not None]
        first = min([oldest, *firsts])
        if self._line.entries and self._line.entries[0].batch < first:
            self._line.entries = [entry for entry in self._line.entries if entry.batch >= first]
        return given_up, left

    def object_names(self) -> set[str]:
        """All objects that hold a segment or a run."""
        return set().union(*(history.object_names() for history in self._histories.values()))

    def require_complete(self, name: str) -> None:
        """Raise CorruptionError if a checkpoint before the newest is lost."""
        missing = [batch for one in self._histories.values() if (batch := one.first_missing) is not None]
        batches = [entry.batch for entry in self._line.entries]
        missing += [before + 1 for before, batch in pairwise(batches) if batch != before + 1]
        if missing:
            raise CorruptionError(
                f"{name}: the log lacks checkpoint {min(missing)}, which later ones build on: files of it are missing.",
                kind=ErrorKind.OBJECT_MISSING,
                hint="Restore the log's folder from a copy; the state cannot be rebuilt without them.",
            )


def read_history(store: Store) -> QueryHistory:
    """The checkpoints in the log of a location; CorruptionError or StorageError if it cannot be read."""
    return QueryHistory(open_log(store, Options(), SystemClock()).read())
