"""Pins: whatever the query deletes meanwhile, a checkpoint whose pin holds is read exactly, or the reader is told."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import PinExpiredError, StateMissingError
from statelog.history.footprint import Footprint
from statelog.history.pins import MARGIN_S, HeldPin, Pin, pin_name, write_pin
from statelog.reading.open import open_logged
from statelog.storage import LocalStore, Store
from statelog.testing.faults import FaultStore
from statelog.testing.query import ManualClock
from tests.reading.pins_support import ReadOnly, Stop
from tests.reading.story import Story, rows, value_rows

RETAINED = 2


@pytest.fixture(scope="module", params=[0, None], ids=["objects", "inline"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A stopped query that retains as little as it can, and materializes as often."""
    made = Story(
        tmp_path_factory.mktemp("story") / "query",
        parallelism=2,
        inline_budget_bytes=request.param,
        retained_checkpoints=RETAINED,
        materialization_interval_s=0,
        max_log_to_base=0,
        max_file_bytes=4000,
        log_min_age_s=0,
    )
    made.run_batches(7, random.Random(1))
    return made


def read(location: str, at: int | str | None = None) -> list[tuple[Any, ...]]:
    return rows(statelog.read_state(location, state="value", at=at).read_all())


def verify(location: str, at: int | str) -> None:
    """Verify the whole query, or a pinned checkpoint: nothing is damaged."""
    assert not statelog.verify(location).damages


def held(story: Story, batch: int, lasts_s: float | None = None) -> HeldPin:
    source = open_logged(story.location, "op", batch)
    return HeldPin(source.store, Footprint.of(source.lineage, batch), owner="test", lasts_s=lasts_s, is_shared=True)


# ---- While others work ----


def stopped_reader(story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> tuple[Story, Stop]:
    """A copy of the query, which runs as many batches as it retains, and more, before the reader's n-th request."""
    query = story.copied(tmp_path / str(number))
    query.start(keep_local=False)
    stop = Stop(number, lambda: query.run_batches(RETAINED + 2, random.Random(2)))
    monkeypatch.setattr("statelog.reading.open.open_location", lambda location: FaultStore(LocalStore(location), stop))
    return query, stop


def test_a_reader_stopped_at_any_request_reads_exactly_or_is_told(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = len(story.models) - RETAINED
    told: list[bool] = []
    for number in itertools.count(1):
        query, stop = stopped_reader(story, tmp_path, monkeypatch, number)
        try:
            assert read(query.location, at) == value_rows(story.models[at])
            told.append(False)
        except (PinExpiredError, StateMissingError):
            told.append(True)
        if stop.requests < number:
            break
    assert told.index(False) > 2, "the query deletes nothing"
    assert told == sorted(told, reverse=True), "once its pin holds, a reader is never told"


def test_a_reader_of_the_newest_checkpoint_finds_one_however_fast_the_query_is(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in itertools.count(1, 3):
        query, stop = stopped_reader(story, tmp_path, monkeypatch, number)
        assert read(query.location) in [value_rows(model) for model in query.models[-RETAINED - 3 :]]
        if stop.requests < number:
            break


def test_a_query_stopped_at_any_request_deletes_nothing_that_a_pin_holds(story: Story, tmp_path: Path) -> None:
    holds = 0
    for number in itertools.count(1, 4):
        readers: list[tuple[int, Any]] = []
        stop = Stop(number, partial(begin_reading, str(tmp_path / str(number) / "location"), readers))
        query = story.copied(tmp_path / str(number), open_store=partial(stopping, stop))
        query.start(keep_local=False)
        query.run_batches(3, random.Random(2))
        query.start(1)
        query.run_batches(2, random.Random(3))
        for at, reader in readers:
            assert rows(reader.read_all()) == value_rows(query.models[at])
            holds += 1
        if stop.requests < number:
            break
    assert holds > 20


def begin_reading(location: str, readers: list[tuple[int, Any]]) -> None:
    """Begin to read every checkpoint that there is."""
    for at in range(20):
        with contextlib.suppress(PinExpiredError, StateMissingError):
            readers.append((at, statelog.read_state(location, state="value", at=at)))


def stopping(stop: Stop, location: str) -> Store:
    return FaultStore(LocalStore(location), stop)


# ---- How long ----


def run_on(query: Story) -> None:
    """Restart the query with other parallelisms, until nothing of its former checkpoints is left."""
    for parallelism in (1, 3):
        query.start(parallelism, keep_local=False)
        query.run_batches(4, random.Random(2))


def test_a_pinned_checkpoint_is_read_long_after_the_query_has_given_it_up(story: Story, tmp_path: Path) -> None:
    query = story.copied(tmp_path / "query")
    at = len(query.models) - 1
    files = [path for path in Path(query.location).rglob("*") if path.is_file()]
    pin = held(query, at)
    run_on(query)
    with pytest.raises(StateMissingError, match=f"no checkpoint {at - 1}"):
        read(query.location, at - 1)
    assert read(query.location, at) == value_rows(query.models[at])
    another = held(query, at)
    pin.release()
    query.run_batches(2, random.Random(2))
    assert read(query.location, at) == value_rows(query.models[at]), "another pin of it stands"
    another.release()
    query.run_batches(2, random.Random(2))
    with pytest.raises(StateMissingError, match=f"no checkpoint {at}"):
        read(query.location, at)
    assert not [path for path in files if path.exists()]


def test_a_pin_that_has_expired_holds_nothing(story: Story, tmp_path: Path) -> None:
    query = story.copied(tmp_path / "query")
    at = len(query.models) - 1
    pin = held(query, at, lasts_s=100)
    run_on(query)
    query.engine.clock.advance(99 + MARGIN_S)
    query.run_batches(2, random.Random(2))
    assert read(query.location, at) == value_rows(query.models[at])
    query.engine.clock.advance(2)
    query.run_batches(2, random.Random(2))
    with pytest.raises(StateMissingError):
        read(query.location, at)
    assert not (Path(query.location) / pin.name).exists()


@pytest.mark.parametrize(
    ("reader", "by_name"), [(read, False), (read, True), (verify, False)], ids=["by batch", "by name", "verify"]
)
def test_a_reader_whose_pin_expires_at_any_request_is_told(
    story: Story,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by_name: bool,
    reader: Callable[[str, int | str], list[tuple[Any, ...]] | None],
) -> None:
    """The query's clock is ahead: for the query the pin has expired, and for the reader it stands."""
    given_up = story.copied(tmp_path / "given up")
    at = len(given_up.models) - 1
    name = held(given_up, at, lasts_s=1000.0).name
    run_on(given_up)
    told = 0
    for number in itertools.count(1, 3):
        query = given_up.copied(tmp_path / str(number))
        query.start(keep_local=False)
        stop = Stop(number, partial(expire_pins, query))
        open_store = partial(stopping, stop)
        monkeypatch.setattr("statelog.reading.open.open_location", open_store)
        try:
            assert reader(query.location, name if by_name else at) in (value_rows(query.models[at]), None)
        except (PinExpiredError, StateMissingError):
            told += 1
        if stop.requests < number:
            break
    assert told > 2 or reader is verify


def expire_pins(query: Story) -> None:
    """Let the query, whose clock jumps, delete the pins that end within an hour, and what they keep."""
    query.engine.clock.advance(3600.0)
    query.run_batches(2, random.Random(2))


def test_a_checkpoint_that_is_gone_cannot_be_pinned(story: Story, tmp_path: Path) -> None:
    query = story.copied(tmp_path / "query")
    history = query.query()
    run_on(query)
    with pytest.raises(PinExpiredError, match="Checkpoint 6 of operator 'op' is no longer retained"):
        HeldPin(LocalStore(query.location), Footprint.of(history, 6), owner="test", lasts_s=None)
    assert not list(Path(query.location).glob("pins/*"))


def test_a_checkpoint_that_a_repetition_of_its_batch_has_replaced_cannot_be_pinned(
    story: Story, tmp_path: Path
) -> None:
    query = story.copied(tmp_path / "query")
    history = query.query()
    query.models.pop()
    query.start()
    query.run_batches(1, random.Random(9))
    with pytest.raises(PinExpiredError, match="Checkpoint 6 of operator 'op' is no longer retained"):
        HeldPin(LocalStore(query.location), Footprint.of(history, 6), owner="test", lasts_s=None)
    assert read(query.location, 6) == value_rows(query.models[6])


def test_nobody_relies_on_a_pin_whose_maker_has_not_seen_yet_that_it_holds(story: Story, tmp_path: Path) -> None:
    """It may have been written too late."""
    query = story.copied(tmp_path / "query")
    history, store = query.query(), LocalStore(query.location)
    run_on(query)
    write_pin(store, pin_name(6, b"late"), Pin.on(Footprint.of(history, 6), owner="late"))
    with pytest.raises(PinExpiredError):
        HeldPin(store, Footprint.of(history, 6), owner="test", lasts_s=None)
    with pytest.raises(StateMissingError):
        read(query.location, 6)


def test_a_reader_that_falls_asleep_is_told(story: Story, tmp_path: Path) -> None:
    query = story.copied(tmp_path / "query")
    clock = ManualClock(0)
    pin = HeldPin(LocalStore(query.location), Footprint.of(query.query(), 6), owner="test", lasts_s=100, clock=clock)
    clock.advance(51)
    before = pin.name
    pin.keep()
    assert pin.name != before
    assert [path.name for path in Path(query.location).glob("pins/*")] == [pin.name.rpartition("/")[2]]
    clock.advance(101)
    with pytest.raises(PinExpiredError, match=r"lasted 100 s, .* for 101 s"):
        pin.keep()


def test_without_the_right_to_write_a_reader_reads_until_the_files_go(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = story.copied(tmp_path / "query")
    query.start()
    monkeypatch.setattr("statelog.reading.open.open_location", lambda location: ReadOnly(LocalStore(location)))
    at = len(query.models) - 1
    assert read(query.location, at) == value_rows(query.models[at])
    reader = statelog.read_state(query.location, state="value", at=at)
    query.run_batches(RETAINED + 2, random.Random(2))
    with pytest.raises(PinExpiredError, match=f"Checkpoint {at} of operator 'op' is no longer retained"):
        reader.read_all()


def test_nothing_is_deleted_while_a_pin_cannot_be_read(
    story: Story, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    query = story.copied(tmp_path / "query")
    at = len(query.models) - 1
    pin = Path(query.location) / held(query, at).name
    pin.write_bytes(pin.read_bytes().replace(b'"test"', b'"tent"'))
    files = [path for path in Path(query.location).rglob("*") if path.is_file() and path != pin]
    run_on(query)
    assert all(path.exists() for path in files)
    assert caplog.text.count("nothing is deleted while it exists") == 2, "once per start"
    pin.unlink()
    query.run_batches(2, random.Random(2))
    assert not all(path.exists() for path in files)
