"""Timers, TTL, deleted states and operator state, read without their query."""

from __future__ import annotations

from typing import Any

import pytest

import statelog
from statelog import ConfigurationError, Options
from statelog.reading import diff
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from tests.reading.kinds_of_state_support import Declared, Reminders, Sums, Visits, visits


def read(harness: Harness, **arguments: Any) -> list[dict[str, Any]]:
    return list(statelog.read_state(parts_of(harness).query.location, **arguments).read_all().to_pylist())


def by_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: str(row["key_k"]))


def test_values_expire_by_the_time_of_the_checkpoint() -> None:
    with visits(Visits()) as harness:
        harness.push([("a", 1), ("b", 2)], processingTimeMs=10)
        harness.push([("b", 3)], processingTimeMs=60)
        harness.push([], processingTimeMs=120)
        a, b = ({"key_k": key, "value_n": n, "expires_ms": until} for key, n, until in (("a", 1, 110), ("b", 3, 160)))
        assert by_key(read(harness, state="timers", at=1)) == [a, b]
        assert read(harness, state="timers") == [b]
        assert read(harness, state="timers", keys=["a", "b"], at=2) == [b]
        assert by_key(read(harness, state="timers", keys=["a", "b"], at=1)) == [a, b]


def test_a_deleted_state_is_gone() -> None:
    with visits(Visits()) as harness:
        harness.push([("a", 1)], processingTimeMs=10)
        assert read(harness, state="old", keys=["a"]) == [{"key_k": "a", "value_n": 1}]
        harness.restart(processor=Visits("old"))
        harness.push([("a", 2)], processingTimeMs=20)
        with pytest.raises(ConfigurationError, match="no state 'old'"):
            read(harness, state="old")
        harness.restart(processor=Visits())
        harness.push([("b", 3)], processingTimeMs=30)
        assert read(harness, state="old") == [{"key_k": "b", "value_n": 3}]
        assert read(harness, state="old", keys=["a", "b"]) == [{"key_k": "b", "value_n": 3}]


def differences(harness: Harness, before: int, after: int, state: str) -> list[tuple[Any, ...]]:
    location = parts_of(harness).query.location
    rows = statelog.read_diff(location, before, after, state=state).read_all().to_pylist()
    return sorted(tuple(row.values()) for row in rows)


def changes(harness: Harness, state: str, **arguments: Any) -> list[tuple[Any, ...]]:
    rows = statelog.read_changes(parts_of(harness).query.location, state=state, **arguments).read_all().to_pylist()
    return [tuple(row.values()) for row in sorted(rows, key=lambda row: (row["batch"], row["key_k"]))]


def test_what_expires_is_a_difference_and_no_change() -> None:
    with visits(Visits()) as harness:
        harness.push([("a", 1), ("b", 2)], processingTimeMs=10)
        harness.push([("b", 2)], processingTimeMs=60)
        harness.push([], processingTimeMs=120)
        assert changes(harness, "timers") == [
            (0, 10, "put", "a", 1, 110),
            (0, 10, "put", "b", 2, 110),
            (1, 60, "put", "b", 2, 160),
        ]
        assert differences(harness, 0, 1, "timers") == [("changed", "b", 2, 2, 110, 160)]
        assert differences(harness, 1, 2, "timers") == [("removed", "a", 1, None, 110, None)]
        assert differences(harness, 2, 1, "timers") == [("added", "a", None, 1, None, 110)]


def test_a_checkpoint_compared_with_itself_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with visits(Visits()) as harness:
        harness.push([("a", 1)], processingTimeMs=10)
        monkeypatch.delattr(diff, "scan_part")
        assert differences(harness, 0, 0, "timers") == []


def test_what_is_deleted_as_a_whole_is_a_difference_and_no_change() -> None:
    with visits(Visits()) as harness:
        harness.push([("a", 1)], processingTimeMs=10)
        harness.restart(processor=Visits("old"))
        harness.push([("a", 2)], processingTimeMs=20)
        harness.restart(processor=Visits())
        harness.push([("b", 3)], processingTimeMs=30)
        assert changes(harness, "old", after=0) == [(2, 30, "put", "b", 3)]
        assert differences(harness, 0, 2, "old") == [("added", "b", None, 3), ("removed", "a", 1, None)]


def test_what_expires_is_a_difference_whichever_checkpoint_has_the_ttl() -> None:
    def values(*ttl: int) -> Declared:
        return Declared(lambda handle: handle.getValueState("v", "n long", *ttl), lambda v, row: v.update((row.n,)))

    with visits(values()) as harness:
        harness.push([("a", 1)], processingTimeMs=10)
        harness.restart(processor=values(100))
        harness.push([("b", 2)], processingTimeMs=20)
        harness.push([], processingTimeMs=200)
        assert differences(harness, 0, 1, "v") == [("added", "b", None, 2, None, 120)]
        assert differences(harness, 1, 0, "v") == [("removed", "b", 2, None)]
        assert differences(harness, 0, 2, "v") == differences(harness, 2, 0, "v") == []


def test_the_changes_of_another_state_of_the_name_are_not_its_own() -> None:
    value = Declared(lambda handle: handle.getValueState("x", "n long"), lambda x, row: x.update((row.n,)))
    mapped = Declared(
        lambda handle: handle.getMapState("x", "m long", "t string"),
        lambda x, row: x.updateValue((row.n,), (str(row.n),)),
    )
    with visits(value) as harness:
        location = parts_of(harness).query.location
        harness.push([("a", 1)], processingTimeMs=10)
        harness.restart(processor=Declared(lambda handle: handle.deleteIfExists("x")))
        harness.push([("a", 2)], processingTimeMs=20)
        harness.restart(processor=mapped)
        harness.push([("a", 3)], processingTimeMs=30)
        put = (2, 30, "put", "a", 3, "3")
        assert changes(harness, "x") == changes(harness, "x", after=0) == [put]
        history = statelog.read_history(location, "a", state="x").read_all().to_pylist()
        assert [tuple(row.values()) for row in history] == [put]
        with pytest.raises(ConfigurationError, match="map state 'x' .* was value state 'x'"):
            changes(harness, "x", after=-1)
        with pytest.raises(ConfigurationError, match="map state 'x' .* was value state 'x'"):
            differences(harness, 0, 2, "x")


def test_timers_are_read_by_key_and_time() -> None:
    with visits(Reminders()) as harness:
        harness.push([("a", 1), ("b", 2)], processingTimeMs=10)
        harness.push([("b", 3)], processingTimeMs=60)
        a, b, later = ({"key_k": key, "time_ms": at} for key, at in (("a", 1010), ("b", 1010), ("b", 1060)))
        assert by_key(read(harness, state="timers")) == [a, b, later]
        assert read(harness, state="timers", keys=["b"]) == [b, later]
        assert differences(harness, 0, 1, "timers") == [("added", "b", 1060)]
        harness.push([], processingTimeMs=1010)
        assert differences(harness, 1, 2, "timers") == [("removed", "a", 1010), ("removed", "b", 1010)]
        assert changes(harness, "timers", after=1) == [(2, 1010, "delete", "a", 1010), (2, 1010, "delete", "b", 1010)]
        assert by_key(read(harness)) == [{"key_k": "a", "value_n": 1}, {"key_k": "b", "value_n": 3}]


@pytest.mark.parametrize("options", [Options(), Options(inline_budget_bytes=0)])
def test_operator_state_is_read_by_subtask(options: Options) -> None:
    with Harness(
        Sums(), input="n long", broadcast="name string, n long", output="n long", parallelism=2, options=options
    ) as harness:
        harness.push([(1,), (2,), (4,)], broadcast=[("a", 5)])
        sums = read(harness, state="sums")
        assert [row["subtask"] for row in sums] == [0, 1]
        assert sum(row["value_n"] for row in sums) == 7
        assert [(row["mapkey_name"], row["value_n"]) for row in read(harness, state="rules")] == [("a", 5)]
        with pytest.raises(ConfigurationError, match="has no keys"):
            read(harness, state="sums", keys=[1])


def measured(harness: Harness, state: str, kind: str | None = None, *, scan: bool = True) -> statelog.StateStats:
    [operator] = statelog.stats(parts_of(harness).query.location, scan=scan)
    [found] = [one for one in operator.states if one.state == state and kind in (None, one.kind)]
    return found


def test_timers_are_measured_and_what_has_expired_is_not_live() -> None:
    with visits(Visits()) as harness:
        harness.push([("a", 1), ("b", 2)], processingTimeMs=10)
        harness.push([("b", 3)], processingTimeMs=60)
        harness.push([], processingTimeMs=120)
        timers = measured(harness, "timers", "timer")
        # Offset, null flag, length and letter; offset and time; and the time as the value.
        key_bytes, entry_bytes, value_bytes = 4 + 1 + 4 + 1, 4 + 8, 8
        row_bytes = key_bytes + entry_bytes + value_bytes
        assert (timers.state, timers.stored_rows, timers.rows, timers.keys, timers.most_rows) == ("timers", 3, 3, 2, 2)
        assert (timers.key_bytes, timers.value_bytes) == (3 * (key_bytes + entry_bytes), 3 * value_bytes)
        assert timers.largest_keys == (
            statelog.KeyStats(("b",), 2, 2 * row_bytes),
            statelog.KeyStats(("a",), 1, row_bytes),
        )
        last = measured(harness, "timers", "value")
        assert (last.stored_rows, last.rows, last.keys) == (3, 1, 1)


def test_a_deleted_state_is_not_measured() -> None:
    with visits(Visits()) as harness:
        harness.push([("a", 1)], processingTimeMs=10)
        harness.restart(processor=Visits("old"))
        harness.push([("a", 2)], processingTimeMs=20)
        [operator] = statelog.stats(parts_of(harness).query.location, scan=True)
        assert "old" not in [one.state for one in operator.states]
        harness.restart(processor=Visits())
        harness.push([("b", 3)], processingTimeMs=30)
        assert (measured(harness, "old").stored_rows, measured(harness, "old").rows) == (2, 1)


@pytest.mark.parametrize("options", [Options(), Options(inline_budget_bytes=0)])
def test_operator_state_is_measured(options: Options) -> None:
    with Harness(
        Sums(), input="n long", broadcast="name string, n long", output="n long", parallelism=2, options=options
    ) as harness:
        harness.push([(number,) for number in range(5)], broadcast=[("a", 5), ("b", 6), ("c", 7)])
        [operator] = statelog.stats(parts_of(harness).query.location)
        [listed] = statelog.list_operators(parts_of(harness).query.location)
        assert operator.state_bytes == listed.state_bytes > operator.states[0].stored_bytes > 0
        assert (operator.base_bytes, operator.log_bytes, operator.levels, operator.largest_groups) == (0, 0, 0, None)
        assert operator.subtask_skew == 1.0
        rules, sums = measured(harness, "rules"), measured(harness, "sums")
        assert (rules.stored_rows, rules.rows) == (6, 3), "each subtask stores all of them"
        assert (rules.key_bytes, rules.value_bytes) == (3 * (4 + 1 + 4 + 1), 3 * 8)
        assert (sums.stored_rows, sums.rows, sums.key_bytes, sums.value_bytes) == (2, 2, 0, 2 * 8)
        assert (sums.keys, sums.largest_keys) == (None, None)
        assert measured(harness, "sums", scan=False).rows is None
