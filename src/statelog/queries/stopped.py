"""A stopped query: its Spark files and its log, and the changes that tools make to both."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from statelog.clock import Clock, SystemClock
from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.history.query_history import QueryHistory, read_history
from statelog.log.entry import INITIAL_BATCH, Claim
from statelog.log.open import open_location, open_log
from statelog.log.references import SegmentRef, StoredRun
from statelog.options import Options
from statelog.spark.checkpoint.checkpoint import COMMITS, OFFSETS, SparkCheckpoint
from statelog.spark.checkpoint.location import state_location
from statelog.storage import Store
from statelog.storage.links import is_link
from statelog.storage.store import if_present


@dataclass(frozen=True)
class News:
    """What a tool's claim says; see :class:`Claim`."""

    follows: bytes | None = None
    renames: tuple[tuple[str, str], ...] = ()
    """Pairs of identity and new uid."""
    ended: tuple[str, ...] = ()
    begins_at: int | None = None


@dataclass(frozen=True)
class StoppedQuery:
    """A query's checkpointLocation and its log, as of the time they were read."""

    spark: SparkCheckpoint
    query_id: str
    store: Store
    location: str
    """Of the log."""
    history: QueryHistory
    """Empty if the log is another query's."""

    @classmethod
    def open(cls, spark: SparkCheckpoint, store: Store, location: str) -> StoppedQuery:
        """Read a query's log in a location; CorruptionError or StorageError if it cannot be read."""
        history, query_id = read_history(store), spark.query_id()
        is_own = history.latest is None or history.latest.query_id == query_id
        return cls(spark, query_id, store, location, history if is_own else QueryHistory())

    def require_state(self) -> None:
        """Raise ConfigurationError if the query has no checkpoint in the location."""
        if self.history.latest is None:
            raise ConfigurationError(
                f"{self.location} holds no state of statelog that belongs to query {self.query_id}.",
                kind=ErrorKind.CHECKPOINT_MISSING,
                hint="Pass location= if the operators were given one.",
            )

    def claim(self, run_id: str, decide: Callable[[QueryHistory], News], clock: Clock | None = None) -> None:
        """Append a claim with the news that `decide` derives from the newest history, which cannot change meanwhile.

        The claim fences a query that is still running. Raises what `decide` raises, and as :meth:`NumberedLog.claim`.
        """
        clock = clock or SystemClock()
        log = open_log(self.store, Options(), clock)

        def make(epoch: int) -> Claim:
            newest = read_history(self.store)
            if newest.latest is not None and newest.latest.query_id != self.query_id:
                raise ConfigurationError(
                    f"{self.location}: the state there belongs to query {newest.latest.query_id}, not to query"
                    f" {self.query_id}.",
                    kind=ErrorKind.OTHER_OWNER,
                    hint="Pass the location of this query's state, or give the query another one.",
                )
            news = decide(newest)
            return Claim(
                epoch,
                self.query_id,
                run_id,
                secrets.token_bytes(16),
                int(clock.now_s() * 1000),
                follows=news.follows,
                renames=dict(news.renames),
                ended=list(news.ended),
                begins_at=news.begins_at,
            )

        log.claim(make)
        log.close()

    # ---- Batches ----

    def is_of_batch(self, batch: int) -> bool:
        """Whether the checkpoint of a batch is retained, and belongs to the batch that Spark knows by this number."""
        entry = self.history.at(batch)
        if entry is None or not self.history.has_batch(batch):
            return False
        return batch not in self.spark.batches(OFFSETS) or self.spark.time_ms(batch) == entry.batch_time_ms

    def choose(self, batch: int | None) -> int:
        """Choose the batch to copy, by default the newest that Spark has committed.

        Raises ConfigurationError if the query has no state or no operator, StateMissingError if Spark or the log lacks
        the batch, CorruptionError if a checkpoint that later ones build on is lost.
        """
        self.require_state()
        self.history.require_complete(self.location)
        committed = self.spark.committed()
        if not committed or (batch is not None and batch not in committed):
            raise self._not_committed(batch, committed)
        chosen = committed[-1] if batch is None else batch
        if not self.is_of_batch(chosen):
            older = [one for one in committed if one < chosen and self.is_of_batch(one)]
            newest = self.history.latest
            assert newest is not None, "the query has state"
            raise StateMissingError(
                f"{self.spark.location}: Spark has committed batch {chosen}, but {self.location} has no checkpoint of"
                f" it: its newest checkpoint is {newest.batch}.",
                hint="Run statelog.rewind(checkpointLocation) first"
                + (f", or choose batch {older[-1]}, the newest one with a checkpoint." if older else "."),
            )
        if not self.history.names_at(chosen):
            raise ConfigurationError(
                f"{self.location}: as of batch {chosen}, the state of all of the query's operators has been given up.",
                kind=ErrorKind.CHECKPOINT_MISSING,
                hint="Start the query: its operators then begin their state.",
            )
        return chosen

    def _not_committed(self, batch: int | None, committed: list[int]) -> StateMissingError:
        kept = [one for one in committed if self.is_of_batch(one)]
        asked = "There is no batch" if batch is None else f"Batch {batch} is not one"
        ends = f" The first such batch is {kept[0]}, the last is {kept[-1]}." if kept else ""
        return StateMissingError(
            f"{self.spark.location}: {asked} that Spark has committed and that has a checkpoint.{ends}",
            hint="Options(retained_checkpoints=...) keeps more checkpoints."
            if kept
            else "Run the query until its first batch has ended; if Spark and the state disagree, run"
            " statelog.rewind(checkpointLocation) first.",
        )

    @property
    def _begins_after(self) -> int:
        """The batch after which a query without a checkpoint begins its state."""
        begins_at = self.history.begins_at
        return INITIAL_BATCH if begins_at is None or begins_at[0] != self.query_id else begins_at[1] - 1

    def rewind_target(self) -> int:
        """The newest checkpoint of a batch that Spark has committed; without one, the batch before the state begins.

        Raises ConfigurationError if the query has no state, CorruptionError if a checkpoint that later ones build on is
        lost, StateMissingError if there is no checkpoint of any batch that Spark has committed.
        """
        commits = self.spark.batches(COMMITS)
        # A start that ends before its first checkpoint leaves none. So after Spark's first commit, a missing one is
        # normal; later, it means that the state is elsewhere or gone.
        is_first = commits[-1:] == [self._begins_after + 1]
        if not is_first:
            self.require_state()
        self.history.require_complete(self.location)
        committed, offsets = max(commits, default=-1), self.spark.batches(OFFSETS)
        entries = [entry for entry in self.history.entries if entry.batch <= committed]
        if self.history.latest is not None and not entries:
            return committed  # The state is ahead of Spark: there is nothing to take back.
        for entry in reversed(entries):
            if entry.batch not in offsets or self.spark.time_ms(entry.batch) in (None, entry.batch_time_ms):
                return entry.batch
        if is_first or not commits:
            return self._begins_after
        raise StateMissingError(
            f"{self.location}: there is no checkpoint of any batch that Spark has committed.",
            hint="Restore the state from a copy made at the same time, or start with a new checkpointLocation.",
        )

    def require_restorable(self, batch: int) -> None:
        """Raise StateMissingError unless the checkpoint of a batch is retained and all its objects exist."""
        if batch < 0 or (self.history.latest is None and batch == self._begins_after):
            return  # The next batch begins with empty state.
        if not self.history.has_batch(batch):
            oldest = self.history.oldest
            kept = "it has none" if oldest is None else f"the oldest that is retained is checkpoint {oldest.batch}"
            raise StateMissingError(
                f"{self.location}: the query would have to go back to checkpoint {batch}, but {kept}.",
                hint="Restore the state from a newer copy, or start with a new checkpointLocation."
                " Options(retained_checkpoints=...) keeps more checkpoints.",
            )
        missing = self._missing_objects(batch)
        if missing:
            shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise StateMissingError(
                f"{self.location}: the query would have to go back to checkpoint {batch}, but {len(missing)} of its"
                f" objects are gone or too short: {shown}.",
                kind=ErrorKind.OBJECT_MISSING,
                hint="Restore them from a copy, or start with a new checkpointLocation.",
            )

    def _missing_objects(self, batch: int) -> list[str]:
        """The objects that a restart after a batch would read and that are gone or too short, by name."""
        needed: list[SegmentRef | StoredRun] = []
        for history in self.history.histories_at(batch):
            checkpoint = history.at(batch)
            assert checkpoint is not None, "the entry has a section of the operator"
            needed += checkpoint.segments
            for subtask in range(0 if checkpoint.is_whole else checkpoint.parallelism):
                wanted = history.missing_segments(b"", subtask, checkpoint.parallelism, batch, set())
                needed += [clipped.segment for clipped in wanted.segments]
                needed += [run for level in wanted.levels for run in level.runs]
        sizes = {info.name: info.size_bytes for info in self.store.list()}
        for name in {one.name for one in needed if is_link(one.name)}:
            sizes[name] = if_present(partial(self.store.size_bytes, name)) or 0
        return sorted({one.name for one in needed if sizes.get(one.name, -1) < one.offset + one.length})


def read_query(checkpoint: SparkCheckpoint, location: str | None) -> StoppedQuery:
    """Read a query's log, at `location` or below its checkpointLocation.

    Raises ConfigurationError if the location is not a checkpoint, CorruptionError or StorageError if the log cannot be
    read.
    """
    place = location or state_location(checkpoint, None)
    return StoppedQuery.open(checkpoint, open_location(place), place)
