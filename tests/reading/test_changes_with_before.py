"""``with_before``: every change has the value that the model had before the batch, and sums can be corrected."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError, StateMissingError
from statelog.reading import before as former
from statelog.storage import LocalStore
from statelog.testing import Harness
from statelog.testing.faults import FaultStore
from statelog.testing.harness import parts_of
from tests.reading.changes_support import Rows, replayed
from tests.reading.changes_with_before_support import require_before
from tests.reading.pins_support import Stop
from tests.reading.story import KEYS, STATES, Story, random_commands

FEW_KEYS = KEYS[:8]
"""Each of them changes in most batches."""


@pytest.fixture(scope="module", params=["inline", "objects", "materialized"])
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A query that was restarted with other parallelisms."""
    options: dict[str, Any] = {"inline_budget_bytes": 0 if request.param == "objects" else None, "keys": FEW_KEYS}
    if request.param == "materialized":
        options |= {"retained_checkpoints": 6, "materialization_interval_s": 0.0, "max_file_bytes": 4000}
        options |= {"log_min_age_s": 0.0}
    made = Story(tmp_path_factory.mktemp("story") / "query", **options)
    rng = random.Random(request.param)
    for parallelism in (None, 2, 5):
        if parallelism is not None:
            made.start(parallelism, keep_local=parallelism == 2)
        made.run_batches(6, rng)
    return made


def changes(story: Story, state: str, **arguments: Any) -> Rows:
    reader = statelog.read_changes(story.location, state=state, with_before=True, **arguments)
    found: Rows = reader.read_all().to_pylist()
    return found


@pytest.fixture(params=["one group", "a group per batch", "halves", "slices"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How much is taken at a time."""
    match request.param:
        case "a group per batch":
            monkeypatch.setattr(former, "GROUP_BYTES", 1)
        case "halves":
            monkeypatch.setattr(former, "FOUND_BYTES", 400)
        case "slices":
            monkeypatch.setattr(former, "GROUP_BYTES", 300)
            monkeypatch.setattr("statelog.reading.rows.SLICE_ROWS", 3)
    return str(request.param)


@pytest.mark.parametrize("state", STATES)
def test_every_change_has_the_value_before_its_batch(story: Story, state: str, sizes: str) -> None:
    found = changes(story, state)
    first, last = found[0]["batch"], found[-1]["batch"]
    assert last == len(story.models) - 1
    assert first in (0, 13), "all, or those after the oldest retained checkpoint"
    require_before(story, found, state)
    batches = [row["batch"] for row in found]
    assert batches == sorted(batches)
    known = STATES[state](story.models[first - 1]) if first else []
    assert replayed(known, found, state) == STATES[state](story.models[last])


@pytest.mark.parametrize("state", STATES)
def test_the_same_changes_without_what_was_before(story: Story, state: str) -> None:
    """Only removals by a clear are more."""
    found = changes(story, state)
    plain = statelog.read_changes(story.location, state=state, after=found[0]["batch"] - 1).read_all().to_pylist()
    with_before = Counter(repr({name: row[name] for name in plain[0]}) for row in found)
    without = Counter(repr(row) for row in plain)
    assert not without - with_before
    cleared = {(row["batch"], row["key_a"], row["key_b"]) for row in plain if row["operation"] == "clear"}
    more = [row for row in found if repr({name: row[name] for name in plain[0]}) in with_before - without]
    assert {(row["batch"], row["key_a"], row["key_b"]) for row in more} <= cleared
    assert {row["operation"] for row in more} <= {"delete"}
    assert bool(more) == (state != "value")


def test_some_keys_some_batches_and_some_columns(story: Story) -> None:
    everything = changes(story, "map")
    last = len(story.models) - 1
    keys = random.Random(1).sample(FEW_KEYS, 3)
    own = [row for row in everything if (row["key_a"], row["key_b"]) in keys]
    assert own
    assert changes(story, "map", keys=keys) == own
    assert changes(story, "map", after=last - 2) == [row for row in everything if row["batch"] > last - 2]
    assert changes(story, "map", after=last - 3, up_to=last - 1) == [
        row for row in everything if last - 3 < row["batch"] < last
    ]
    assert changes(story, "map", after=last) == []
    chosen = changes(story, "map", columns=["before_field"])
    assert [row["before_field"] for row in chosen] == [row["before_field"] for row in everything]


def test_a_state_that_is_gone_is_missed(tmp_path: Path) -> None:
    query = Story(tmp_path, retained_checkpoints=2, materialization_interval_s=0.0, max_file_bytes=1, log_min_age_s=0.0)
    query.run_batches(12, random.Random(1))
    assert {row["batch"] for row in changes(query, "value")} == {11}
    with pytest.raises(StateMissingError, match="no checkpoint 8: it retains 10 to 11"):
        changes(query, "value", after=8)
    statelog.pin(query.location, at=10, lasts_s=None, owner="audit")
    query.run_batches(3, random.Random(2))
    require_before(query, changes(query, "value", after=13), "value")


@pytest.mark.parametrize("batches", [1, 6])
def test_a_reader_stopped_at_any_request_reads_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """The query deletes what it can before the reader's n-th request."""
    story = Story(
        tmp_path / "query",
        parallelism=2,
        inline_budget_bytes=0,
        retained_checkpoints=3,
        materialization_interval_s=0.0,
        max_file_bytes=1,
        log_min_age_s=0.0,
        keys=FEW_KEYS,
    )
    story.run_batches(7, random.Random(1))
    for number in itertools.count(1, 2):
        query = story.copied(tmp_path / str(number))
        query.start(keep_local=False)
        stop = Stop(number, lambda query=query: query.run_batches(batches, random.Random(2)))  # type: ignore[misc]  # a lambda with a default has no inferred type
        with monkeypatch.context() as patch:
            patch.setattr(
                "statelog.reading.open.open_location",
                lambda location, stop=stop: FaultStore(LocalStore(location), stop),
            )
            require_before(query, changes(query, "map"), "map")
        if stop.requests < number:
            break
    assert number > 20


class Visits:
    """Keeps the last visit, and one for each place, for 100 ms by the batch's time or the watermark."""

    def __init__(self, ttl: Any = 100) -> None:
        self._ttl = ttl

    def init(self, handle: Any) -> None:
        self._last = handle.getValueState("last", "n long", self._ttl)
        self._places = handle.getMapState("places", "place string", "n long", self._ttl)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            if row.n == 0:
                self._places.clear()
            else:
                self._last.update((row.n,))
                self._places.updateValue((f"p{row.n % 2}",), (row.n,))
        yield from ()

    def close(self) -> None:
        pass


@pytest.fixture(params=[1, 1 << 20])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch at a time, or all at once."""
    monkeypatch.setattr(former, "GROUP_BYTES", request.param)


def shown(harness: Harness, state: str, *names: str) -> list[tuple[Any, ...]]:
    rows = statelog.read_changes(parts_of(harness).query.location, state=state, with_before=True).read_all().to_pylist()
    return [tuple(row[name] for name in ("batch", "operation", *names)) for row in rows]


@pytest.mark.usefixtures("groups")
def test_what_has_expired_was_not_there() -> None:
    with Harness(
        Visits(), input="k string, n long", keys=["k"], output="n long", timeMode="ProcessingTime", parallelism=2
    ) as harness:
        for n, time_ms in ((1, 10), (2, 109), (3, 209), (4, 300), (0, 310), (5, 320), (0, 420)):
            harness.push([("a", n)], processingTimeMs=time_ms)
        names = ["before_n", "value_n", "before_expires_ms", "expires_ms"]
        assert shown(harness, "last", *names) == [
            (0, "put", None, 1, None, 110),
            (1, "put", 1, 2, 110, 209),
            (2, "put", None, 3, None, 309),
            (3, "put", 3, 4, 309, 400),
            (5, "put", 4, 5, 400, 420),
        ]
        assert shown(harness, "places", "mapkey_place", "before_n", "value_n") == [
            (0, "put", "p1", None, 1),
            (1, "put", "p0", None, 2),
            (2, "put", "p1", None, 3),
            (3, "put", "p0", None, 4),
            (4, "clear", None, None, None),
            (4, "delete", "p0", 4, None),
            (5, "put", "p1", None, 5),
            (6, "clear", None, None, None),
        ]


@pytest.mark.usefixtures("groups")
def test_what_has_expired_by_the_watermark_was_not_there() -> None:
    with Harness(
        Visits(statelog.Ttl(100, time="event")),
        input="k string, n long, time timestamp",
        keys=["k"],
        output="n long",
        watermark=statelog.Watermark("time"),
    ) as harness:
        for n, time_ms in ((1, 10), (2, 105), (2, 300), (3, 301)):
            harness.push([("a", n, datetime.fromtimestamp(time_ms / 1000, UTC))])
        assert shown(harness, "places", "mapkey_place", "before_n", "before_expires_ms") == [
            (0, "put", "p1", None, None),
            (1, "put", "p0", None, None),
            (2, "put", "p0", 2, 205),
            (3, "put", "p1", None, None),
        ]


class Basket:
    """Lists the items of each key; who reads the list lets it live on."""

    def init(self, handle: Any) -> None:
        self._items = handle.getListState("items", "n long", statelog.Ttl(100, renew_on_read=True))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            if row.n:
                self._items.appendValue((row.n,))
            else:
                list(self._items.get())
        yield from ()

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("groups")
def test_an_element_that_lives_on_was_there_before() -> None:
    with Harness(
        Basket(), input="k string, n long", keys=["k"], output="n long", timeMode="ProcessingTime", parallelism=2
    ) as harness:
        for n, time_ms in ((1, 10), (2, 60), (0, 80)):
            harness.push([("a", n)], processingTimeMs=time_ms)
        assert shown(harness, "items", "before_n", "value_n", "before_expires_ms", "expires_ms") == [
            (0, "put", None, 1, None, 110),
            (1, "put", None, 2, None, 160),
            (2, "put", 1, 1, 110, 180),
            (2, "put", 2, 2, 160, 180),
        ]


@pytest.mark.usefixtures("groups")
def test_what_was_deleted_as_a_whole_was_not_there() -> None:
    class Kept(Visits):
        def __init__(self, is_deleted: bool) -> None:
            self._is_deleted = is_deleted

        def init(self, handle: Any) -> None:
            self._places = handle.getMapState("places", "place string", "n long")
            if self._is_deleted:
                handle.deleteIfExists("last")
                self._last = self
            else:
                self._last = handle.getValueState("last", "n long")

        def update(self, row: Any) -> None:
            """Keep nothing."""

    with Harness(Kept(False), input="k string, n long", keys=["k"], output="n long", parallelism=2) as harness:
        harness.push([("a", 1)])
        harness.push([("a", 2)])
        harness.restart(processor=Kept(True))
        harness.push([("a", 3)])
        harness.restart(processor=Kept(False))
        harness.push([("a", 4)])
        harness.push([("a", 5)])
        batches = [(0, None, 1), (1, 1, 2), (3, None, 4), (4, 4, 5)]
        assert shown(harness, "last", "before_n", "value_n") == [(batch, "put", *values) for batch, *values in batches]


def test_columns_of_expiry_and_of_timers(tmp_path: Path) -> None:
    query = Story(tmp_path)
    query.run(0, random_commands(random.Random(1), 10))
    names = statelog.read_changes(query.location, state="map", with_before=True).schema.names
    assert names[3:] == ["key_a", "key_b", "mapkey_field", "before_field", "value_field"]
    with pytest.raises(ConfigurationError, match="has no column 'before_field'"):
        statelog.read_changes(query.location, state="map", columns=["before_field"])
