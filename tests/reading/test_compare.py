"""``compare``: states are equal if all their rows are, whatever the files and subtasks that hold them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError, OperatorProcessor
from statelog.__main__ import main
from statelog.runs.key_groups import GROUP_SHIFT
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from tests.model.engine import Command, Key
from tests.reading.kinds_of_state_support import Sums, Visits, visits
from tests.reading.story import Story, hash_of


def run_two(directory: Path, batches: int = 6) -> tuple[Story, Story]:
    """The same query twice, with other subtasks and files."""
    one = Story(directory / "one", parallelism=3)
    other = Story(directory / "other", parallelism=2, inline_budget_bytes=0, materialization_interval_s=0.0)
    for story in (one, other):
        story.run_batches(batches, random.Random(1))
    return one, other


def compare(one: Story, other: Story, **arguments: Any) -> dict[str, statelog.StateComparison]:
    return {each.state: each for each in statelog.compare(one.location, other.location, **arguments)}


def test_the_same_rows_are_equal_however_they_are_stored(tmp_path: Path) -> None:
    one, other = run_two(tmp_path)
    found = compare(one, other)
    assert set(found) >= {"value", "list", "map"}
    assert all(each.is_equal and each.rows == each.other_rows for each in found.values())
    assert found["value"].rows > 20
    other.start(5)
    other.run_batches(3, random.Random(2))
    assert not all(each.is_equal for each in compare(one, other).values())
    assert all(each.is_equal for each in compare(one, other, at=5).values())
    assert all(each.is_equal for each in compare(one, other, other_at=5).values())


@pytest.mark.parametrize(
    ("command", "state"),
    [
        (("set", 77), "value"),
        (("unset",), "value"),
        (("append", "e", "x"), "list"),
        (("put", "p", 77), "map"),
        (("remove", "p"), "map"),
    ],
)
def test_the_key_group_of_a_difference_is_named(tmp_path: Path, command: Any, state: str) -> None:
    one, other = run_two(tmp_path, 0)
    key: Key = (3, "a")
    before: list[tuple[Key, Command]] = [
        (key, ("set", 1)),
        (key, ("append", "a", "b")),
        (key, ("put", "p", 1)),
        ((4, None), ("set", None)),
    ]
    for story in (one, other):
        story.run(0, before)
    one.run(1, [])
    other.run(1, [(key, command)])
    found = compare(one, other)
    assert found[state].different_groups == ((hash_of(key) % (1 << 64)) >> GROUP_SHIFT,)
    assert [each.state for each in found.values() if not each.is_equal] == [state]


def test_the_order_of_a_list_counts(tmp_path: Path) -> None:
    one, other = run_two(tmp_path, 0)
    one.run(0, [((1, "a"), ("append", "a", "b"))])
    other.run(0, [((1, "a"), ("append", "b", "a"))])
    found = compare(one, other)["list"]
    assert not found.is_equal
    assert found.rows == found.other_rows == 2


def test_columns_may_differ_that_are_ignored() -> None:
    with visits(Visits()) as one, visits(Visits()) as other:
        one.push([("a", 1)], processingTimeMs=10)
        other.push([("a", 1)], processingTimeMs=20)
        places = [parts_of(each).query.location for each in (one, other)]
        different = {each.state for each in statelog.compare(*places) if not each.is_equal}
        assert different == {"timers"}
        found = statelog.compare(*places, ignore=["expires_ms", "time_ms"])
        assert all(each.is_equal for each in found)
        assert found


def test_operator_state_is_compared_without_its_subtasks() -> None:
    def sums(parallelism: int) -> Harness:
        return Harness(
            Sums(), input="n long", output="n long", broadcast="name string, n long", parallelism=parallelism
        )

    with sums(2) as one, sums(3) as other:
        for harness in (one, other):
            harness.push([(1,)], broadcast=[("limit", 5)])
        places = [parts_of(each).query.location for each in (one, other)]
        found = {each.state: each for each in statelog.compare(*places)}
        assert found["rules"].is_equal
        other.push([], broadcast=[("limit", 6)])
        found = {each.state: each for each in statelog.compare(*places)}
        assert found["rules"].different_groups == (0,)


class Other:
    """Keeps a state that the other processors have in another type, and one that they have not."""

    def __init__(self, name: str, schema: str) -> None:
        self._name, self._schema = name, schema

    def init(self, handle: Any) -> None:
        self._state = handle.getValueState(self._name, self._schema)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self._state.update((sum(1 for _ in rows),))
        yield from ()

    def close(self) -> None:
        pass


def test_other_states_and_columns_are_named(tmp_path: Path) -> None:
    made = [
        Harness(Other(name, schema), input="k string, n long", keys=["k"], output="n long")
        for name, schema in (("n", "n long"), ("m", "n long"), ("n", "n int"))
    ]
    try:
        for harness in made:
            harness.push([("a", 1)])
        one, two, three = (parts_of(harness).query.location for harness in made)
        with pytest.raises(ConfigurationError, match="do not both have state 'm'"):
            statelog.compare(one, two)
        with pytest.raises(ConfigurationError, match="'value_n' of state 'n' with the same type: int64 and int32"):
            statelog.compare(one, three)
        assert [each.is_equal for each in statelog.compare(one, three, ignore=["value_n"])] == [True]
    finally:
        for harness in made:
            harness.close()


def test_the_command_tells_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = run_two(tmp_path)
    assert main(["compare", one.location, other.location]) == 0
    assert "value" in capsys.readouterr().out
    other.run_batches(1, random.Random(3))
    assert main(["compare", one.location, other.location, "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert any(each["different_groups"] for each in found)
    assert main(["compare", one.location, other.location, "--at", "5"]) == 0
    assert main(["compare", one.location, str(tmp_path / "nothing")]) == 1
    assert "holds no state" in capsys.readouterr().err


class Keep(OperatorProcessor):
    """Keeps the numbers of its rows."""

    def init(self, handle: Any) -> None:
        self._numbers = handle.getListState("numbers", "n long")
        self._all = handle.getUnionListState("all", "n long")

    def process(self, rows: Iterator[Any], *_: Any) -> Iterator[Any]:
        for row in rows:
            self._numbers.add((row.n,))
        yield from ()

    def close(self) -> None:
        pass


def kept(parallelism: int, numbers: list[int]) -> Harness:
    harness = Harness(Keep(), input="n long", output="n long", parallelism=parallelism)
    harness.push([(number,) for number in numbers])
    return harness


def test_elements_without_keys_are_compared_wherever_they_are() -> None:
    with kept(1, [1, 2, 2, 3, 4]) as one, kept(3, [4, 2, 3, 1, 2]) as other, kept(2, [1, 2, 3, 3, 4]) as unlike:
        places = [parts_of(harness).query.location for harness in (one, other, unlike)]
        assert all(each.is_equal for each in statelog.compare(*places[:2]))
        assert {each.state: each.is_equal for each in statelog.compare(places[0], places[2])} == {
            "all": True,
            "numbers": False,
        }
        one.restart(2)
        one.push([])
        assert all(each.is_equal for each in statelog.compare(*places[:2]))
