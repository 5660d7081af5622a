"""The line of a query's checkpoints: what counts, whose names mean something that counts, and what a reader can tell.

Random stories are compared with a model that forgets nothing.
"""

from __future__ import annotations

import random
from typing import Any, Final

import pytest
from msgspec.structs import replace

from statelog import CorruptionError
from statelog.errors import ErrorKind
from statelog.history.pins import pin_name
from statelog.history.query_history import Line, QueryHistory, read_history
from statelog.log.entry import INITIAL_BATCH, Claim, Cut, EntryPlace, Parent, QueryCheckpoint, Section
from statelog.log.numbered import NumberedLog
from statelog.log.references import Base, BaseRange, Level, SegmentRef
from statelog.runs.key_groups import hash_range
from statelog.testing.query import ManualClock
from tests.short_log import IDENTITY, ShortLog, base, base_range, identity_of
from tests.stores import MemoryStore

START: Final = EntryPlace(0, 0)
OTHER = "other"


# ---- Stories ----


class Model:
    """What a story has written: all of it, and what of it counts."""

    def __init__(self) -> None:
        self.written: list[QueryCheckpoint] = []
        self.line: list[QueryCheckpoint] = []
        self.names: dict[str, str] = {}
        self.ended: set[str] = set()

    def append(self, entry: QueryCheckpoint) -> None:
        self.written.append(entry)
        self.line = [earlier for earlier in self.line if earlier.batch < entry.batch] + [entry]
        self.names |= {section.identity: section.uid for section in entry.sections}

    def is_given_up(self, entry: QueryCheckpoint) -> bool:
        """Whether a later entry has said so, on whichever line it was: files may be gone since."""
        later = self.written[self.written.index(entry) :]
        return any(other.retained_from > entry.batch for other in later)

    def claim(self, claim: Claim) -> None:
        self.names |= claim.renames
        self.ended |= set(claim.ended)
        if claim.follows is not None:
            ids = [entry.id for entry in self.line]
            self.line = self.line[: ids.index(claim.follows) + 1] if claim.follows else []


class Story:
    """A query in several starts, with tools between them; its log begins later and later.

    `drops` is whether what was taken back is forgotten once no pin speaks of it.
    """

    def __init__(self, seed: int, *, drops: bool) -> None:
        self.rng = random.Random(seed)
        self.drops = drops
        self.model = Model()
        self.pins: list[QueryCheckpoint] = []
        self.store = MemoryStore(ManualClock())
        self.log = self.opened()
        self.tokens = 0
        self.roster: dict[str, str] = {}
        """The identities of the operators, by uid."""
        self.query = QueryHistory()
        """The writer's own."""
        self.next_batch = 0
        self.listed = START
        self.is_in_doubt = False

    def opened(self) -> NumberedLog:
        return NumberedLog(self.store, "log", ManualClock(), appends=True, max_file_bytes=3000, min_age_s=0)

    def token(self) -> bytes:
        self.tokens += 1
        return b"%d" % self.tokens

    # ---- Claims ----

    def claim(self, **news: Any) -> None:
        """Let a tool or a start claim the location."""
        self.log = self.opened()
        made = Claim(0, "query", "run", self.token(), 0, **news)
        before = self.log.claim(lambda epoch: replace(made, epoch=epoch))
        self.query = QueryHistory([*before, replace(made, number=self.log.number)])
        self.model.claim(made)
        self.listed, self.is_in_doubt = START, False

    def use_tool(self) -> None:
        query = read_history(self.store)
        kept = [entry for entry in query.entries if query.has_batch(entry.batch)]
        names = query.names
        match self.rng.randrange(4):
            case 0 if kept:
                self.claim(follows=self.rng.choice(kept).id)
            case 1:
                self.claim(follows=b"")
            case 2 if names:
                self.claim(renames={self.rng.choice(list(names.values())): f"renamed {self.tokens}"})
            case 3 if names:
                self.claim(ended=[self.rng.choice(list(names.values()))])

    def start(self) -> None:
        """Begin with the next batch, repeat the last one, or start over.

        The claim takes back what the start repeats; without that, the first entry of the start does.
        """
        query = read_history(self.store)
        after = 0 if query.latest is None else query.latest.batch + 1
        can_repeat = after > 0 and (after == 1 or query.has_batch(after - 2))
        first = self.rng.choice([after] * 4 + [after - 1] * 4 * can_repeat + [0])
        before = query.at(first - 1)
        self.claim(follows=(b"" if before is None else before.id) if self.rng.random() < 0.7 else None)
        kept = self.query.names_at(first - 1) if first else {}
        added = [f"op {self.tokens}"] * (self.rng.random() < 0.3 or not kept)
        self.roster = kept | {uid: f"{uid}-{self.token().decode()}" for uid in added}
        self.next_batch = first
        self.retained_from = INITIAL_BATCH if first == 0 else self.query.retained_from

    # ---- Entries ----

    def run(self) -> None:
        """Write the entry of the next batch; sometimes its outcome is unknown, or another entry follows."""
        batch = self.next_batch
        while self.rng.random() < 0.15:
            self.append(batch, is_lost=True)
        self.append(batch)
        while self.rng.random() < 0.2:
            self.append(batch)
        self.next_batch += 1

    def append(self, batch: int, *, is_lost: bool = False) -> None:
        token, former = self.token(), self.query.at(batch)
        is_revised = former is not None and former.epoch == self.log.epoch
        oldest = max(self.retained_from, batch - 2)
        start = self.query.log_start(oldest, batch, {})
        before = self.query.at(batch - 1)
        entry = QueryCheckpoint(
            epoch=self.log.epoch,
            batch=batch,
            revision=former.revision + 1 if former is not None and is_revised else 0,
            id=former.id if former is not None and is_revised else token,
            follows=b"" if before is None else before.id,
            query_id="query",
            run_id="run",
            token=token,
            batch_time_ms=0,
            watermark_ms=0,
            sections=[self.section(uid, identity, batch) for uid, identity in sorted(self.roster.items())],
            log_start=self.log.number if start is None else start,
            retained_from=oldest,
            ended=self.query.ended,
            cuts=list(self.query.cuts),
        )
        durable = self.log.append(entry, [])
        self.model.append(durable)
        if is_lost:
            self.is_in_doubt = True
            return
        self.query.add(durable, may_replace=self.is_in_doubt)
        self.is_in_doubt, self.retained_from = False, oldest
        self.query.settle(oldest)
        self.query.retain(oldest, {})
        if self.drops:
            self.query.drop_cuts(self.listed)
        names = self.log.removable(durable.log_start)
        self.log.forget(names)
        self.store.delete(names)

    def section(self, uid: str, identity: str, batch: int) -> Section:
        """Operators with keys materialize their state now and then; those without have all of it in each entry."""
        own, before = hash_range(0, 1), self.query.at(batch - 1)
        begins = before is None or all(section.identity != identity for section in before.sections)
        section = Section(identity, uid, 1, [SegmentRef(0, 1, b"", 0, 1, 1, 1, f"{identity}/changes/{batch}")], b"", [])
        if sum(identity.encode()) % 2:
            return replace(section, begins=begins)
        level = Level(0, batch - 1, b"", b"%d" % batch, own.first, own.last, [])
        ranges = [BaseRange(own.first, own.last, Base(0, 1, [level]))] if self.rng.random() < 0.4 else None
        return replace(section, key_schema=b"keys", begins=begins, base_ranges=ranges)

    # ---- Names of entries ----

    def pin(self) -> None:
        """Whoever reads the log may pin what counts and is retained."""
        query = read_history(self.store)
        kept = [entry for entry in query.entries if query.has_batch(entry.batch)]
        self.pins += self.rng.sample(kept, min(len(kept), 1))

    def unpin(self) -> None:
        self.pins = self.rng.sample(self.pins, self.rng.randrange(len(self.pins) + 1))

    def list_pins(self) -> None:
        """The writer lists the pins."""
        if self.query.latest is not None and not self.is_in_doubt:
            self.listed = min([self.query.latest.place, *(pin.place for pin in self.pins)])

    # ---- What must be so ----

    def check(self) -> None:
        read = read_history(self.store)
        self.check_line(read)
        self.check_operators(read)
        self.check_names(read)
        if not self.is_in_doubt:
            self.check_line(self.query)
            self.check_operators(self.query)
            self.check_names(self.query)

    def check_line(self, query: QueryHistory) -> None:
        """What is known of the line is its end, and what can be restored is all there."""
        line = self.model.line
        known = list(query.entries)
        assert known == (line[-len(known) :] if known else [])
        assert (query.latest is None) == (not line)
        assert [query.at(entry.batch) for entry in known] == known
        assert query.at(len(line)) is None
        if line:
            retained = [entry for entry in line if not self.model.is_given_up(entry)]
            assert [entry for entry in line if query.has_batch(entry.batch)] == retained
            assert query.oldest == retained[0]
        query.require_complete("here")
        batches, places = [cut.batch for cut in query.cuts], [cut.place for cut in query.cuts]
        assert (batches, places) == (sorted(set(batches)), sorted(places)), "none lies within another"

    def check_operators(self, query: QueryHistory) -> None:
        model, latest = self.model, query.latest
        mentioned = {section.identity for entry in query.entries for section in entry.sections}
        assert query.ended == sorted(model.ended & mentioned)
        assert {one for one, history in query.histories.items() if history.latest} == mentioned - model.ended
        for identity, history in query.histories.items():
            having = [entry for entry in query.entries if identity in {one.identity for one in entry.sections}]
            tokens = [one.token for one in history.checkpoints]
            assert tokens == [entry.token for entry in having][-len(tokens) :]
            assert {one.uid for one in history.checkpoints} <= {model.names[identity]}
        present = () if latest is None else [one.identity for one in latest.sections]
        assert query.names == {model.names[one]: one for one in present if one not in model.ended}
        for uid, identity in query.names.items():
            assert query.of(uid) is query.histories[identity]
            assert query.name_of(identity) == uid

    def check_names(self, query: QueryHistory) -> None:
        """Of every entry that was ever written, or of those that somebody may speak of."""
        tokens = {entry.token for entry in self.model.line}
        asked = self.pins if self.drops else self.model.written
        wrong = [
            (entry.batch, entry.token, entry.place)
            for entry in asked
            if query.has_on_line(entry.batch, entry.token, entry.place) != (entry.token in tokens)
        ]
        assert not wrong, list(query.cuts)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("group", range(10))
def test_any_story(group: int, drops: bool) -> None:
    for seed in range(group * 20, group * 20 + 20):
        story = Story(seed, drops=drops)
        try:
            story.start()
            for _ in range(60):
                match story.rng.randrange(12):
                    case 0:
                        story.use_tool()
                        story.check()
                        story.start()
                    case 1:
                        story.start()
                    case 2:
                        story.pin()
                    case 3:
                        story.unpin()
                    case 4 | 5:
                        story.list_pins()
                    case _:
                        story.run()
                story.check()
            if story.rng.random() < 0.5:
                story.append(story.next_batch, is_lost=True)
                story.pin()
                story.check()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


# ---- What counts ----


def known(query: QueryHistory) -> list[bytes]:
    return [entry.token for entry in query.entries]


def cuts(query: QueryHistory) -> list[Cut]:
    """Without that of the first entry, before which there is nothing."""
    first = query.entries[0].place
    return [cut for cut in query.cuts if cut.place != first]


def is_on_line(query: QueryHistory, *entries: QueryCheckpoint) -> list[bool]:
    return [query.has_on_line(entry.batch, entry.token, entry.place) for entry in entries]


def test_an_entry_counts_in_place_of_those_of_its_batch_and_of_later_ones() -> None:
    log = ShortLog()
    zero, one, two, again = (log.run(batch) for batch in (0, 1, 2, 1))
    query = log.query()
    assert known(query) == [zero.token, again.token]
    assert is_on_line(query, zero, one, two, again) == [True, False, False, True]
    assert cuts(query) == [Cut(0, again.place)]
    assert (query.latest, query.at(1), query.at(2)) == (again, again, None)


def test_a_claim_goes_back_to_a_checkpoint_by_the_id_that_its_revisions_share() -> None:
    log = ShortLog(2)
    one, revised, two = log.query().entries[1], log.run(1, entry={"id": b"one"}), log.run(2)
    log.claim(follows=b"one")
    query = log.query()
    assert query.latest == revised
    assert is_on_line(query, one, revised, two) == [False, True, False]
    log.claim(follows=b"nobody's")
    assert log.query().latest == revised, "it is no longer there, and neither is what came after it"
    log.claim(follows=b"")
    assert (log.query().latest, log.query().names, list(log.query().histories)) == (None, {}, [])


def test_another_querys_claim_takes_nothing_back() -> None:
    """It came between that query's look at the location and its claim, and is refused after it."""
    log = ShortLog(2)
    latest = log.query().latest
    log.claim(query_id="another", follows=b"")
    assert log.query().latest == latest


def test_a_cut_within_another_is_one() -> None:
    log = ShortLog(4)
    log.run(3)
    log.run(2)
    last = log.run(1)
    assert cuts(log.query()) == [Cut(0, last.place)]
    later = log.run(1)
    log.run(2)
    revised = log.run(2)
    assert cuts(log.query()) == [Cut(0, later.place), Cut(1, revised.place)]


def test_what_a_claim_took_back_is_known_although_the_claim_is_not() -> None:
    """The entries after it tell, also to whoever reads the log from later ones on."""
    log = ShortLog(3)
    first, target = log.query().entries[0], log.query().entries[1]
    lost = log.query().entries[2]
    log.claim(follows=target.id)
    log.run(2, base_ranges=[base_range(1)], entry={"log_start": log.log.number})
    query = log.query()
    assert [entry.batch for entry in query.entries] == [2]
    assert is_on_line(query, first, target, lost) == [True, True, False]
    log.run(3, base_ranges=[base_range(2)], entry={"log_start": log.log.number})
    assert is_on_line(log.query(), first, target, lost) == [True, True, False]


def test_what_the_oldest_known_entry_has_replaced_is_known_once_that_is_gone() -> None:
    """A start that has read the log from that one on writes the next ones."""
    log = ShortLog(2, max_file_bytes=1)
    lost = log.query().entries[1]
    log.run(1, base_ranges=[base_range(0)])
    log.run(2, base_ranges=[base_range(1)], entry={"log_start": log.log.number, "cuts": []})
    log.run(3, base_ranges=[base_range(2)], entry={"log_start": log.log.number})
    assert [entry.batch for entry in log.query().entries] == [2, 3]
    assert is_on_line(log.query(), lost) == [True], "nobody can tell if no entry does"
    log = ShortLog(2, max_file_bytes=1)
    lost = log.query().entries[1]
    entry = log.run(1, base_ranges=[base_range(0)], entry={"log_start": log.log.number + 1})
    assert known(log.query()) == [entry.token]
    log.run(2, base_ranges=[base_range(1)], entry={"log_start": log.log.number + 1})
    log.run(3, base_ranges=[base_range(2)], entry={"log_start": log.log.number + 1})
    assert [entry.batch for entry in log.query().entries] == [3]
    assert is_on_line(log.query(), lost) == [False]


def test_what_was_given_up_stays_so_although_the_query_goes_back() -> None:
    """A later entry has allowed that its files be deleted. A query that starts over has other files."""
    log = ShortLog(3)
    target = log.query().entries[2]
    log.retained_from = 2
    log.run(3)
    log.claim(follows=target.id)
    query = log.query()
    assert (query.latest, query.retained_from) == (target, 2)
    assert [query.has_batch(batch) for batch in range(4)] == [False, False, True, False]
    assert (query.oldest, query.histories[IDENTITY].oldest) == (target, query.histories[IDENTITY].at(2))
    log.retained_from = INITIAL_BATCH
    log.run(0, begins=True)
    assert (log.query().retained_from, log.query().has_batch(0)) == (INITIAL_BATCH, True)


def test_a_query_that_goes_back_to_its_beginning_has_given_up_nothing() -> None:
    log = ShortLog(5)
    log.retained_from = 3
    log.run(5)
    assert log.query().retained_from == 3
    log.claim(follows=b"")
    assert log.query().retained_from == INITIAL_BATCH


def test_a_lost_checkpoint_is_one_that_the_query_or_an_operator_lacks() -> None:
    log = ShortLog(3, uids=("op", OTHER))
    log.query().require_complete("here")
    whole = list(log.query().entries)
    for entries, lost in (([whole[0], whole[2]], 1), (whole[1:], 0)):
        with pytest.raises(CorruptionError, match=f"here: the log lacks checkpoint {lost}") as caught:
            QueryHistory(entries).require_complete("here")
        assert caught.value.kind is ErrorKind.OBJECT_MISSING
        assert not any(map(QueryHistory(entries).has_batch, range(3)))
        there = {entry.batch: entry for entry in entries}
        assert [QueryHistory(entries).at(batch) for batch in range(4)] == [there.get(batch) for batch in range(4)]


def test_a_checkpoint_is_lost_also_between_those_of_different_operators() -> None:
    log = ShortLog(2, key_schema=b"")
    log.uids = [OTHER]
    entries = [*log.query().entries, log.run(2), log.run(3)]
    QueryHistory(entries).require_complete("here")
    for gone in (1, 2):
        with pytest.raises(CorruptionError, match=f"lacks checkpoint {gone}"):
            QueryHistory([*entries[:gone], *entries[gone + 1 :]]).require_complete("here")


def test_a_copy_stays_as_it_is() -> None:
    log = ShortLog(3)
    query = log.query()
    copied = query.copy()
    before = (known(copied), list(copied.cuts), copied.retained_from, copied.names)
    query.add(log.run(1, entry={"retained_from": 1}))
    query.retain(1, {})
    assert (known(copied), list(copied.cuts), copied.retained_from, copied.names) == before
    assert copied.histories[IDENTITY].has_batch(2)


# ---- Operators ----


def test_operators_are_those_of_the_newest_checkpoint_and_histories_of_all() -> None:
    log = ShortLog(2)
    log.uids.append(OTHER)
    log.run(2)
    log.uids.remove("op")
    log.run(3)
    query, other = log.query(), identity_of(OTHER)
    assert [query.names_at(batch) for batch in range(5)] == [
        {"op": IDENTITY},
        {"op": IDENTITY},
        {"op": IDENTITY, OTHER: other},
        {OTHER: other},
        {},
    ]
    assert query.names == {OTHER: other}
    assert (query.of("op"), query.of(OTHER)) == (None, query.histories[other])
    assert [[one.batch for one in history.checkpoints] for history in query.histories.values()] == [[0, 1, 2], [2, 3]]
    assert list(query.histories_at(2)) == [query.histories[IDENTITY], query.histories[other]]
    assert query.histories[other].has_batch(2), "it began with that batch"


def test_an_operator_that_has_ended_has_no_history_on_any_line() -> None:
    log = ShortLog(3, uids=("op", OTHER))
    target = log.query().entries[1]
    log.claim(ended=[IDENTITY])
    log.claim(follows=target.id)
    query = log.query()
    assert query.names == {OTHER: identity_of(OTHER)}
    assert list(query.histories) == [identity_of(OTHER)]
    assert query.ended == [IDENTITY]
    assert query.has_batch(1), "without it"
    assert query.name_of(IDENTITY) == "op", "a pin may keep it"


def test_an_entry_tells_which_operators_of_older_ones_have_ended() -> None:
    """The claim that said so may be gone."""
    log = ShortLog(2, uids=("op", OTHER))
    first = log.run(2)
    log.uids.remove("op")
    second = log.run(3, entry={"ended": [IDENTITY]})
    query = QueryHistory([first, second])
    assert list(query.histories) == [identity_of(OTHER)]
    assert query.ended == [IDENTITY]
    query.retain(3, {})
    assert query.ended == [IDENTITY], "the other operator's first changes are in the same entries"
    assert QueryHistory([second]).ended == [], "nothing has a section of it any more"


def test_the_last_name_of_an_operator_is_that_of_all_its_checkpoints() -> None:
    log = ShortLog(2)
    log.claim(renames={IDENTITY: "renamed"})
    query = log.query()
    assert query.names == {"renamed": IDENTITY}
    assert {one.uid for one in query.histories[IDENTITY].checkpoints} == {"renamed"}
    log.run(2, uid="renamed")
    log.claim(renames={IDENTITY: "again"})
    log.run(3, uid="again")
    target = log.query().entries[1]
    log.claim(follows=target.id)
    assert log.query().names == {"again": IDENTITY}, "on whichever line it was named so"
    assert log.query().name_of("nobody") is None


def test_the_newest_entry_names_the_parent_on_whichever_line_it_is() -> None:
    log, parent = ShortLog(1), Parent("/parent", 0, pin_name(0, b"x"))
    assert log.query().parent is None
    named = log.run(1, entry={"parent": parent})
    assert (log.query().parent, log.query().copy().parent) == (parent, parent)
    log.run(2)
    log.claim(follows=named.id)
    assert log.query().parent is None


def test_a_query_begins_with_the_batch_that_a_tool_has_named_and_then_with_its_first() -> None:
    """Its first checkpoint says so, also when it is taken back and the claim is no longer read."""
    log = ShortLog()
    assert log.query().begins_at is None
    log.claim(begins_at=6)
    log.claim(begins_at=7)
    log.claim()
    assert (log.query().begins_at, log.query().copy().begins_at) == (("query", 7), ("query", 7))
    log.retained_from = 6
    first = log.run(7, entry={"log_start": log.log.number})
    log.run(8, entry={"log_start": first.number})
    log.claim(begins_at=9)
    assert log.query().begins_at == ("query", 7), "it has state"
    log.claim(follows=b"")
    assert (log.query().latest, log.query().begins_at) == (None, ("query", 7))


def test_a_query_that_was_given_its_state_does_not_begin_with_its_first_batch() -> None:
    log = ShortLog()
    log.claim(begins_at=7)
    log.retained_from = 7
    log.run(7, base_ranges=[base_range(7)])
    assert log.query().begins_at is None


# ---- Retention ----


def pair() -> ShortLog:
    """One operator builds on a base through batch 2 from batch 4 on, the other on all changes; a file per entry."""
    log = ShortLog(4, uids=("op", OTHER), max_file_bytes=1)
    log.run(4, base_ranges=[base_range(2)])
    log.run(5)
    return log


def test_the_log_begins_with_the_first_entry_that_any_operator_needs() -> None:
    log = pair()
    query, files = log.query(), [entry.number for entry in log.query().entries]
    assert query.log_start(4, 6, {}) == files[0]
    log.run(6, others={"base_ranges": [base_range(4, identity_of(OTHER))]})
    query, files = log.query(), [entry.number for entry in log.query().entries]
    assert query.log_start(6, 7, {}) == files[3]
    assert query.log_start(6, 7, {identity_of(OTHER): 1}) == files[1]
    assert QueryHistory().log_start(3, 4, {}) is None


def test_entries_are_dropped_that_no_operator_needs() -> None:
    query = pair().query()
    given_up, left = query.retain(5, {})
    assert [(one.checkpoint.uid, one.batch) for one in given_up] == [("op", 0), ("op", 1), ("op", 2)]
    assert left == []
    assert [entry.batch for entry in query.entries] == list(range(6)), "the other operator needs them"
    assert query.has_batch(5)


def test_of_an_operator_that_has_left_everything_is_given_up_with_its_last_checkpoint() -> None:
    log = ShortLog(2, uids=("op", OTHER))
    log.run(2, others={"bases": [base(1, identity_of(OTHER))]})
    log.uids.remove(OTHER)
    log.run(3, base_ranges=[base_range(2)])
    log.run(4)
    query = log.query()
    given_up, left = query.retain(2, {})
    assert (given_up, left, len(query.histories)) == ([], [], 2)
    given_up, left = query.retain(3, {})
    assert [(one.checkpoint.uid, one.batch) for one in given_up] == [("op", 0), ("op", 1), ("op", 2)] + [
        (OTHER, batch) for batch in range(3)
    ]
    assert [run.name for run in left] == [f"{identity_of(OTHER)}/runs/1/0/1"]
    assert list(query.histories) == [IDENTITY]
    assert [entry.batch for entry in query.entries] == [3, 4]


def test_the_line_is_one_of_successive_batches() -> None:
    """Whatever is looked for."""
    line = Line()
    assert line.at(0) is None
    assert not line.entries
    entries = ShortLog(3).query().entries
    for entry in entries[1:]:
        line.add(entry)
    assert [line.at(batch) for batch in range(-1, 4)] == [None, None, entries[1], entries[2], None]
