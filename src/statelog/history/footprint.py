"""What a checkpoint needs: its footprint."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator

import msgspec
from msgspec.structs import replace

from statelog.errors import CorruptionError
from statelog.history.operator_history import History
from statelog.history.query_history import QueryHistory
from statelog.log.entry import Checkpoint, EntryPlace, FrameReader, QueryCheckpoint
from statelog.log.numbered import base_name
from statelog.log.open import LOG_FOLDER
from statelog.log.references import BaseRange, SegmentRef, StoredRun
from statelog.runs.key_groups import Natural
from statelog.storage import Store


class OperatorFootprint(msgspec.Struct, frozen=True):
    """The part of an operator that a checkpoint needs, besides the entries."""

    identity: str
    uid: str
    """The operator's name at the time."""
    base_ranges: list[BaseRange]
    """The materialized states that count in the checkpoint, or in the state that a consumer builds on."""
    state_bytes: int
    """Bytes that a reader of the whole state reads, besides the log's entries."""


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of some operators of its query, and everything that they need; or their changes up to it."""

    query_id: str
    batch: Natural
    token: bytes
    """Token of the checkpoint's entry."""
    batch_time_ms: int
    """Milliseconds since the Unix epoch."""
    entries: list[EntryPlace]
    """The places of the entries that the checkpoint is made of, oldest first; its own entry is the last."""
    operators: list[OperatorFootprint]
    """In order of their names."""
    objects: list[str]
    """All objects that the operators need, including those of the log, sorted."""
    since: int | None = None
    """If not None, the changes of each batch from this one on are needed, too."""

    @classmethod
    def of(
        cls, query: QueryHistory, batch: int, *, since: int | None = None, operators: Collection[str] | None = None
    ) -> Footprint:
        """The footprint of a checkpoint that the history can restore.

        `operators` are the identities of the operators that count; None for all. With `since`, the changes of each
        batch from that one on count as well.
        """
        entry = query.at(batch)
        assert entry is not None, f"checkpoint {batch} is not there"
        names: set[str] = set()
        places: set[EntryPlace] = set()
        kept: list[OperatorFootprint] = []
        for history in query.histories_at(batch):
            record = history.record(batch)
            assert record is not None, "the entry has a section of the operator"
            own = record.checkpoint
            if operators is not None and own.identity not in operators:
                continue
            first = record.needed_from if since is None else min(record.needed_from, since)
            needed = list(history.between(first, batch))
            ranges = [] if record.base_map is None else list(record.base_map.ranges)
            parts = _parts(needed, ranges)
            names |= {part.name for part in parts}
            places |= {one.place for one in needed}
            kept.append(OperatorFootprint(own.identity, own.uid, ranges, sum(part.length for part in parts)))
        return Footprint(
            query_id=entry.query_id,
            batch=batch,
            token=entry.token,
            batch_time_ms=entry.batch_time_ms,
            entries=sorted(places | {entry.place}),
            operators=kept,
            objects=sorted(names | {log_file(place.number) for place in places | {entry.place}}),
            since=since,
        )

    @classmethod
    def of_changes(
        cls, history: History, batch: int, *, since: int, base_ranges: Collection[BaseRange] = ()
    ) -> Footprint:
        """The footprint of an operator's changes from the batch `since` to another one.

        `base_ranges` are those of the state that the changes build on, if it is needed as well.
        """
        kept = list(history.between(since, batch))
        assert kept, f"there are no changes from {since} to {batch}"
        parts = _parts(kept, base_ranges)
        own = kept[-1]
        size_bytes = sum(part.length for part in parts)
        return Footprint(
            query_id=own.query_id,
            batch=own.batch,
            token=own.token,
            batch_time_ms=own.batch_time_ms,
            entries=[checkpoint.place for checkpoint in kept],
            operators=[OperatorFootprint(own.identity, own.uid, list(base_ranges), size_bytes)],
            objects=sorted({part.name for part in parts} | {log_file(one.number) for one in kept}),
            since=since,
        )

    @property
    def place(self) -> EntryPlace:
        """Where the checkpoint's entry is."""
        return self.entries[-1]

    @property
    def state_bytes(self) -> int:
        """Bytes that a reader of the whole checkpoint reads, besides the log's entries."""
        return sum(one.state_bytes for one in self.operators)

    def operator(self, identity: str) -> OperatorFootprint | None:
        """The footprint of an operator; None if the operator is not one of these."""
        return next((one for one in self.operators if one.identity == identity), None)

    def is_on_line(self, query: QueryHistory) -> bool:
        """Whether the checkpoint's entry counts now, or did until it was deleted."""
        return query.has_on_line(self.batch, self.token, self.place)

    def is_retained(self, query: QueryHistory) -> bool:
        """Whether a log retains the checkpoint, with the changes that are needed."""
        entry = query.at(self.batch)
        return entry is not None and entry.token == self.token and self._retains(query, self.batch)

    @property
    def _is_of_checkpoint(self) -> bool:
        """Whether its entries make a checkpoint, and not only changes."""
        return True

    def _retains(self, query: QueryHistory, state_at: int | None) -> bool:
        if state_at is not None and query.retained_from > state_at:
            return False
        histories = [query.histories.get(one.identity) for one in self.operators]
        return all(
            history is not None and (self.since is None or history.changes_from <= self.since) for history in histories
        )

    def history(self, store: Store, identity: str) -> History:
        """The history of an operator's checkpoint alone; raises CorruptionError or StorageError."""
        return self.query(store).histories[identity]

    def query(self, store: Store) -> QueryHistory:
        """The checkpoint alone, for these operators; raises the errors of :meth:`history`."""
        kept = {one.identity: one for one in self.operators}
        found: list[QueryCheckpoint] = []
        for entry in self._read_entries(store):
            own = [replace(one, uid=kept[one.identity].uid) for one in entry.sections if one.identity in kept]
            found.append(replace(entry, sections=own, retained_from=self.batch, ended=[], cuts=[]))
        if self._is_of_checkpoint:
            own = [replace(one, base_ranges=kept[one.identity].base_ranges) for one in found[-1].sections]
            found[-1] = replace(found[-1], sections=own)
        return QueryHistory(found)

    def lacks(self, store: Store) -> set[str]:
        """The operators of the checkpoint that are not among these; raises the errors of :meth:`history`."""
        sections = self._read_entries(store)[-1].sections
        return {section.identity for section in sections if self.operator(section.identity) is None}

    def _read_entries(self, store: Store) -> list[QueryCheckpoint]:
        found: list[QueryCheckpoint] = []
        readers: dict[int, FrameReader] = {}
        for place in self.entries:
            name = log_file(place.number)
            reader = readers.setdefault(place.number, FrameReader(store, name, place.number))
            frame = reader.frame_at(place.offset, sys.maxsize)
            if frame is None or not isinstance(frame.entry, QueryCheckpoint):
                raise CorruptionError(
                    f"{name}: the entry at offset {place.offset}, which a pin names, is not a checkpoint.",
                    hint="Restore the file from a copy.",
                )
            found.append(frame.entry)
        if found[-1].token != self.token:
            raise CorruptionError(
                f"The entries that a pin of checkpoint {self.batch} names are not those that it was made for.",
                hint="Restore the log from a copy.",
            )
        return found


def stored_parts(history: History, batch: int) -> Iterator[SegmentRef | StoredRun]:
    """The changesets, snapshots and materialized runs that an operator's checkpoint is read from."""
    record = history.record(batch)
    assert record is not None, f"checkpoint {batch} is not there"
    for checkpoint in history.between(record.needed_from, batch):
        # A start reads the snapshots of all subtasks, and only changesets with rows.
        yield from (segment for segment in checkpoint.segments if segment.rows or checkpoint.is_whole)
    for base_range in () if record.base_map is None else record.base_map.ranges:
        yield from base_range.runs


def _parts(checkpoints: Iterable[Checkpoint], ranges: Iterable[BaseRange]) -> list[StoredRun | SegmentRef]:
    """The segments of some checkpoints, and the runs of some base ranges."""
    parts: list[StoredRun | SegmentRef] = [segment for checkpoint in checkpoints for segment in checkpoint.segments]
    return parts + [run for base_range in ranges for run in base_range.runs]


def log_file(number: int) -> str:
    """The object name of a log file."""
    return f"{LOG_FOLDER}/{base_name(number)}"
