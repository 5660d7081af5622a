"""The contract of the log as tests, which a subclass for each log runs.

Races are not left to chance: a test lets the other process act at each store operation in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from statelog.errors import CorruptionError, FencedError, StorageError
from statelog.log.entry import Claim, Entry, EntryPlace, FrameReader, QueryCheckpoint, Section
from statelog.log.numbered import NumberedLog
from statelog.log.references import SegmentRef
from statelog.runs import digests
from statelog.storage.store import Store, StoreWrapper
from statelog.testing.faults import FaultPlan, FaultStore
from tests.entries import segments_in, unplaced

PREFIX = "query/log"


def make_claim(run: str) -> Callable[[int], Claim]:
    """Return a function that makes the claim of a start, given the epoch; `run` is the start's run id."""
    return lambda epoch: Claim(epoch, "query", run, f"{run}-{epoch}".encode(), 0)


def make_checkpoint(
    run: str, epoch: int, batch: int, token: str = "", copies: int = 1
) -> tuple[QueryCheckpoint, list[bytes]]:
    """Make a checkpoint of two operators, with its payload; its content depends on all arguments."""
    text = f"{run} {epoch} {batch} {token}".encode()
    payload = [text * copies, b"\0" * 40 + text * copies]
    sums = [digests.checksum(part) for part in payload]
    sections = [
        Section("a-1", "a", 1, [SegmentRef(0, 10, sums[0], 0, len(payload[0]), 1, 1)], b"k", []),
        Section("b-2", "b", 1, [SegmentRef(0, 11, sums[1], len(payload[0]), len(payload[1]), 1, 1)], b"k", []),
    ]
    return QueryCheckpoint(epoch, batch, 0, text, b"", "query", run, text, 0, 0, sections), payload


def one_section(segments: list[SegmentRef]) -> QueryCheckpoint:
    """Make the first checkpoint of a query with one operator, which has a subtask for each segment."""
    section = Section("a-1", "a", max(len(segments), 1), segments, b"k", [])
    return QueryCheckpoint(1, 0, 0, b"t", b"", "query", "a", b"t", 0, 0, [section])


class Action:
    """An action of another process at a chosen point; keeps the function's results and ignores its failures."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.results: list[Any] = []
        self.calls = 0

    @property
    def is_called(self) -> bool:
        """Whether the action has taken place, successfully or not."""
        return self.calls > 0

    def __call__(self) -> None:
        self.calls += 1
        with suppress(FencedError, StorageError):
            self.results.append(self._function())


class FlippedStore(StoreWrapper):
    """Reads one object with one flipped bit: bit `bit` of the byte at `position` of `name`."""

    def __init__(self, inner: Store, name: str, position: int, bit: int) -> None:
        super().__init__(inner)
        self._name = name
        self._position = position
        self._bit = bit

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        data = bytearray(super().read(name, offset=offset, length=length))
        if name == self._name and offset <= self._position < offset + len(data):
            data[self._position - offset] ^= 1 << self._bit
        return bytes(data)


class LogContract:
    """Conformance tests of a log; pytest collects them from a subclass.

    A subclass overrides the fixture :meth:`open_store` and the method :meth:`make_log`.
    """

    @pytest.fixture
    def open_store(self) -> Callable[[], Store]:
        """Return a function that opens the same store at each call, as another process would."""
        raise NotImplementedError

    def make_log(self, store: Store) -> NumberedLog:
        """Return the log in the folder PREFIX of a store."""
        raise NotImplementedError

    @pytest.fixture
    def open_log(self, open_store: Callable[[], Store]) -> Callable[..., NumberedLog]:
        """Return a function that opens the log on the same storage, as another process would."""

        def open_log(*plans: FaultPlan) -> NumberedLog:
            store = open_store()
            for plan in plans:
                store = FaultStore(store, plan)
            return self.make_log(store)

        return open_log

    def test_read_before_the_first_claim(self, open_log: Callable[..., NumberedLog]) -> None:
        assert read(open_log()) == []

    def test_what_was_appended_is_read(self, open_log: Callable[..., NumberedLog]) -> None:
        log = open_log()
        assert claim_for(log, "a") == []
        written = [log.append(*make_checkpoint("a", 1, batch)) for batch in range(3)]
        assert read(open_log()) == [make_claim("a")(1), *written]
        log.close()
        other = open_log()
        assert claim_for(other, "b") == [make_claim("a")(1), *written]
        more = other.append(*make_checkpoint("b", 2, 3))
        assert read(open_log()) == [make_claim("a")(1), *written, make_claim("b")(2), more]

    def test_claims_and_checkpoints_know_their_files(
        self, open_log: Callable[..., NumberedLog], open_store: Callable[[], Store]
    ) -> None:
        for epoch, run in enumerate("abc", 1):
            log = open_log()
            log.claim(make_claim(run))
            claimed = log.number
            written = [log.append(*make_checkpoint(run, epoch, batch)) for batch in range(2)]
            log.close()
            found = open_log().read()[-3:]
            assert found == [replace(make_claim(run)(epoch), number=claimed), *written]
            assert EntryPlace(claimed, 0) < written[0].place < written[1].place
            for entry in written:
                name = log.name_of(entry.number)
                reader = FrameReader(open_store(), name, entry.number)
                frame = reader.frame_at(entry.offset, open_store().size_bytes(name))
                assert frame is not None
                assert frame.entry == entry

    def test_segments_are_where_they_say(
        self, open_log: Callable[..., NumberedLog], open_store: Callable[[], Store]
    ) -> None:
        log = open_log()
        log.claim(make_claim("a"))
        for batch in range(3):
            entry, payload = make_checkpoint("a", 1, batch)
            placed = log.append(entry, payload)
            assert [read_segment(open_store(), segment) for segment in segments_in(placed)] == payload

    def test_segments_elsewhere_stay_where_they_are(self, open_log: Callable[..., NumberedLog]) -> None:
        log = open_log()
        log.claim(make_claim("a"))
        elsewhere = SegmentRef(0, 10, b"sum", 7, 5, 1, 1, "operator-1/changes/1/0/x")
        assert segments_in(log.append(one_section([elsewhere]), [])) == [elsewhere]
        assert segments_in(checkpoints(read(open_log()))[0]) == [elsewhere]

    def test_large_index_and_payload(
        self, open_log: Callable[..., NumberedLog], open_store: Callable[[], Store]
    ) -> None:
        log = open_log()
        log.claim(make_claim("a"))
        payload = [bytes([subtask % 256]) * 100 for subtask in range(3000)]
        segments = [SegmentRef(n, n, b"s" * 16, 100 * n, 100, 1, 1) for n in range(3000)]
        placed = log.append(one_section(segments), payload)
        after = log.append(*make_checkpoint("a", 1, 1))
        assert checkpoints(read(open_log())) == [placed, after]
        assert read_segment(open_store(), segments_in(placed)[2999]) == payload[2999]

    def test_the_older_writer_is_fenced(self, open_log: Callable[..., NumberedLog]) -> None:
        older, newer = open_log(), open_log()
        older.claim(make_claim("a"))
        first = older.append(*make_checkpoint("a", 1, 0))
        seen = claim_for(newer, "b")
        assert seen == [make_claim("a")(1), first]
        for _ in range(2):
            with pytest.raises(FencedError, match=r"epoch 1 .*query/log.*Stop this driver"):
                older.append(*make_checkpoint("a", 1, 1))
        second = newer.append(*make_checkpoint("b", 2, 1))
        expected = [*seen, make_claim("b")(2), second]
        assert read(open_log()) == expected
        older.close()
        newer.close()
        assert read(open_log()) == expected

    def test_only_a_claimed_open_log_can_be_appended_to(self, open_log: Callable[..., NumberedLog]) -> None:
        log = open_log()
        with pytest.raises(FencedError):
            log.append(*make_checkpoint("a", 1, 0))
        log.claim(make_claim("a"))
        log.append(*make_checkpoint("a", 1, 0))
        log.close()
        with pytest.raises(FencedError):
            log.append(*make_checkpoint("a", 1, 1))
        assert len(claim_for(log, "a")) == 2
        log.append(*make_checkpoint("a", 2, 1))

    def test_close_leaves_nothing_of_a_lonely_claim(
        self, open_log: Callable[..., NumberedLog], open_store: Callable[[], Store]
    ) -> None:
        log = open_log()
        log.claim(make_claim("a"))
        log.close()
        log.close()
        assert open_store().list() == []
        log = open_log()
        assert claim_for(log, "b") == []
        log.append(*make_checkpoint("b", 1, 0))
        before = read(open_log())
        log.close()
        lonely = open_log()
        lonely.claim(make_claim("c"))
        lonely.close()
        assert read(open_log()) == [*before, make_claim("c")(2)]

    def test_a_claim_between_any_two_steps_of_a_close(
        self, open_log: Callable[..., NumberedLog], open_store: Callable[[], Store]
    ) -> None:
        for step in steps():
            newer = open_log()
            claim = Action(partial(claim_for, newer, "b"))
            closing = open_log(FaultPlan.at(call=step, action=claim))
            with suppress(FencedError):
                closing.claim(make_claim("a"))
            closing.close()
            if not claim.results:
                return
            b, a = newest_claims(open_log(), "b", "a")
            if b > a:
                written = newer.append(*make_checkpoint("b", b, 0))
                assert checkpoints(read(open_log())) == [written]
            else:
                with pytest.raises(FencedError):
                    newer.append(*make_checkpoint("b", b, 0))
            wipe(open_store())

    def test_a_close_between_any_two_steps_of_a_claim(
        self, open_log: Callable[..., NumberedLog], open_store: Callable[[], Store]
    ) -> None:
        for step in steps():
            closing = open_log()
            closing.claim(make_claim("a"))
            close = Action(closing.close)
            newer = open_log(FaultPlan.at(call=step, action=close))
            with suppress(StorageError):
                newer.claim(make_claim("b"))
            if not close.results:
                return
            newer.claim(make_claim("b"))
            (b,) = newest_claims(open_log(), "b")
            written = newer.append(*make_checkpoint("b", b, 0))
            assert checkpoints(read(open_log())) == [written]
            wipe(open_store())

    def test_a_claim_between_any_two_steps_of_a_writer(
        self, open_log: Callable[..., NumberedLog], open_store: Callable[[], Store]
    ) -> None:
        for step in steps():
            newer = open_log()
            claim = Action(partial(claim_for, newer, "b"))
            older = open_log(FaultPlan.at(call=step, action=claim))
            acked: list[QueryCheckpoint] = []
            with suppress(FencedError):
                older.claim(make_claim("a"))
                (epoch,) = newest_claims(open_log(), "a")
                for batch in range(3):
                    acked.append(older.append(*make_checkpoint("a", epoch, batch)))
            if not claim.results:
                return
            history = read(open_log())
            b, a = newest_claims(open_log(), "b", "a")
            if b > a:
                (seen,) = claim.results
                assert history == [*seen, make_claim("b")(b)]
                assert checkpoints(seen)[: len(acked)] == acked
                with pytest.raises(FencedError):
                    older.append(*make_checkpoint("a", a, 3))
                written = newer.append(*make_checkpoint("b", b, 3))
                assert read(open_log()) == [*history, written]
            else:
                assert checkpoints(history) == acked
                assert len(acked) == 3
                with pytest.raises(FencedError):
                    newer.append(*make_checkpoint("b", b, 3))
            wipe(open_store())

    def test_an_append_between_any_two_steps_of_a_claim(
        self, open_log: Callable[..., NumberedLog], open_store: Callable[[], Store]
    ) -> None:
        for step in steps():
            older = open_log()
            older.claim(make_claim("a"))
            acked = [older.append(*make_checkpoint("a", 1, 0))]
            append = Action(partial(older.append, *make_checkpoint("a", 1, 1)))
            newer = open_log(FaultPlan.at(call=step, action=append))
            seen = claim_for(newer, "b")
            if not append.is_called:
                return
            acked += append.results
            assert checkpoints(seen)[: len(acked)] == acked
            with pytest.raises(FencedError):
                older.append(*make_checkpoint("a", 1, 2))
            assert read(open_log()) == [*seen, make_claim("b")(2)]
            wipe(open_store())

    def test_a_claim_and_an_append_between_any_two_steps_of_a_claim(
        self, open_log: Callable[..., NumberedLog], open_store: Callable[[], Store]
    ) -> None:
        for step in steps():
            oldest, other = open_log(), open_log()
            oldest.claim(make_claim("a"))
            first = oldest.append(*make_checkpoint("a", 1, 0))
            append = Action(partial(oldest.append, *make_checkpoint("a", 1, 1)))

            def claim_and_append(other: NumberedLog = other, append: Action = append) -> list[Entry]:
                seen = claim_for(other, "c")
                append()
                return seen

            claim = Action(claim_and_append)
            one = open_log(FaultPlan.at(call=step, action=claim))
            seen: list[Entry] = []
            with suppress(FencedError):
                seen = claim_for(one, "b")
            if not claim.results:
                return
            assert append.is_called
            assert not append.results
            b, c = newest_claims(open_log(), "b", "c")
            winner, run, epoch, view = (one, "b", b, seen) if b > c else (other, "c", c, claim.results[0])
            assert checkpoints(view)[:1] == [first]
            written = winner.append(*make_checkpoint(run, epoch, 1))
            assert read(open_log()) == [*view, make_claim(run)(epoch), written]
            with pytest.raises(FencedError):
                (other if winner is one else one).append(*make_checkpoint("b", 0, 1))
            wipe(open_store())

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("revised", [False, True])
    def test_trying_again_after_a_failure_at_any_step(
        self,
        open_log: Callable[..., NumberedLog],
        open_store: Callable[[], Store],
        when: Literal["before", "after"],
        revised: bool,
    ) -> None:
        for step in steps():
            log = open_log(FaultPlan.at(call=step, when=when))
            claim = Action(partial(claim_for, log, "a"))
            claim()
            if not claim.results:
                claim()
            (epoch,) = newest_claims(open_log(), "a")
            acked: list[QueryCheckpoint] = []
            failures = claim.calls - 1
            for batch in range(3):
                try:
                    acked.append(log.append(*make_checkpoint("a", epoch, batch)))
                except StorageError:
                    failures += 1
                    token = "revised, and longer" if revised else ""
                    acked.append(log.append(*make_checkpoint("a", epoch, batch, token)))
            if not failures:
                return
            found = checkpoints(read(open_log()))
            assert latest_by_batch(found) == acked
            assert len(found) <= 3 + revised
            for entry in acked:
                texts = [read_segment(open_store(), segment) for segment in segments_in(entry)]
                assert texts == [entry.token, b"\0" * 40 + entry.token]
            assert checkpoints(claim_for(open_log(), "b")) == found
            wipe(open_store())

    @pytest.mark.parametrize("lost", range(1, 12))
    def test_an_unanswered_entry_that_a_newer_epoch_counted_stays_whole(
        self, open_log: Callable[..., NumberedLog], open_store: Callable[[], Store], lost: int
    ) -> None:
        for step in steps():
            claim = Action(partial(claim_for, open_log(), "b"))
            older = open_log(FaultPlan.at(call=lost, when="after"), FaultPlan.at(call=step, action=claim))
            with suppress(StorageError, FencedError):
                older.claim(make_claim("a"))
            (a,) = newest_claims(open_log(), "a")
            append = Action(partial(older.append, *make_checkpoint("a", a, 0)))
            revise = Action(partial(older.append, *make_checkpoint("a", a, 0, "revised, and longer")))
            append()
            revise()
            if not claim.results:
                return
            (seen,) = claim.results
            b, a = newest_claims(open_log(), "b", "a")
            assert read(open_log())[: len(seen)] == seen
            for entry in checkpoints(seen):
                texts = [read_segment(open_store(), segment) for segment in segments_in(entry)]
                assert texts == [entry.token, b"\0" * 40 + entry.token]
            if b > a:
                acked = {entry.token for entry in append.results + revise.results}
                assert acked <= {entry.token for entry in checkpoints(seen)}
            wipe(open_store())

    def test_a_flipped_bit_is_found_or_has_no_effect(
        self, open_log: Callable[..., NumberedLog], open_store: Callable[[], Store]
    ) -> None:
        for run, epoch in (("a", 1), ("b", 2)):
            log = open_log()
            log.claim(make_claim(run))
            log.append(*make_checkpoint(run, epoch, epoch))
            log.close()
        store = open_store()
        truth = read(open_log())
        payload_bytes = {
            (segment.name, segment.offset + position)
            for entry in checkpoints(truth)
            for segment in segments_in(entry)
            for position in range(segment.length)
        }
        for info in store.list():
            for position in range(info.size_bytes):
                damaged = self.make_log(FlippedStore(store, info.name, position, position % 8))
                if (info.name, position) in payload_bytes:
                    assert read(damaged) == truth
                else:
                    with pytest.raises(CorruptionError, match=info.name):
                        read(damaged)

    def test_a_missing_object_in_the_middle_is_found(
        self, open_log: Callable[..., NumberedLog], open_store: Callable[[], Store]
    ) -> None:
        for epoch in range(1, 5):
            log = open_log()
            log.claim(make_claim("a"))
            log.append(*make_checkpoint("a", epoch, epoch))
            log.close()
        names = [info.name for info in open_store().list()]
        open_store().delete(names[:1])
        read(open_log())
        open_store().delete(names[2:3])
        with pytest.raises(CorruptionError, match="but lacks 3"):
            read(open_log())

    def test_many_claims_in_a_row(self, open_log: Callable[..., NumberedLog]) -> None:
        expected: list[Entry] = []
        for epoch in range(1, 8):
            log = open_log()
            assert claim_for(log, "a") == expected
            expected.append(make_claim("a")(epoch))
            if epoch % 3:
                expected.append(log.append(*make_checkpoint("a", epoch, epoch)))
        assert read(open_log()) == expected


def steps() -> Iterator[int]:
    """Number store operations from 1; a test returns at the first that its scenario does not reach."""
    yield from range(1, 100)
    pytest.fail("the scenario takes more store operations than the test can have meant")


def checkpoints(entries: list[Entry]) -> list[QueryCheckpoint]:
    """Return the checkpoints among entries."""
    return [entry for entry in entries if isinstance(entry, QueryCheckpoint)]


def latest_by_batch(entries: list[QueryCheckpoint]) -> list[QueryCheckpoint]:
    """Return the last checkpoint of each batch, by batch."""
    return [entry for _, entry in sorted({entry.batch: entry for entry in entries}.items())]


def read(log: NumberedLog) -> list[Entry]:
    """Read a log."""
    return unplaced(log.read())


def claim_for(log: NumberedLog, run: str) -> list[Entry]:
    """Claim a log for a run; return the entries before."""
    return unplaced(log.claim(make_claim(run)))


def newest_claims(log: NumberedLog, *runs: str) -> list[int]:
    """Return the newest epoch that each start has claimed; 0 for none."""
    epochs = {claim.run_id: claim.epoch for claim in read(log) if isinstance(claim, Claim)}
    return [epochs.get(run, 0) for run in runs]


def wipe(store: Store) -> None:
    """Delete all objects of a store."""
    store.delete([info.name for info in store.list()])


def read_segment(store: Store, segment: SegmentRef) -> bytes:
    """Read the bytes that a segment refers to."""
    return store.read(segment.name, offset=segment.offset, length=segment.length)
