"""Which subtasks move where, compared with all placements; and what the options accept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import statelog
from statelog import ConfigurationError, Options
from statelog.spark.plan.placement import make_placement, may_have_several_executors, rebalanced, what_moves_subtasks


@pytest.mark.parametrize(
    ("places", "executors", "slots", "moved"),
    [
        ("aabb", "abc", 3, {3: "c"}),  # one has come
        ("aaaa", "ab", 2, {2: "b", 3: "b"}),
        ("abc", "abcd", 4, {}),  # nobody has too many
        ("aabb", "abc", 6, {}),  # two cores each: nobody waits
        ("aaab", "ab", 4, {2: "b"}),
        ("aaabb", "ab", 2, {}),  # five on two cannot be more even
        ("-a-b", "ab", 2, {0: "a", 2: "b"}),  # some have no place
        ("zab", "ab", 2, {0: "a"}),  # one is gone
        ("----", "abc", 3, {0: "a", 1: "b", 2: "c", 3: "a"}),  # the start
    ],
)
def test_subtasks_beyond_the_fair_share_move(places: str, executors: str, slots: int, moved: dict[int, str]) -> None:
    assert rebalanced([None if place == "-" else place for place in places], list(executors), slots) == moved


@given(st.lists(st.sampled_from(["a", "b", "c", "gone", None]), min_size=1, max_size=7), st.integers(1, 2))
def test_no_placement_is_done_in_fewer_waves(places: list[str | None], cores: int) -> None:
    """The answer is compared with all placements: as few waves of tasks as possible, and no move that is of no use."""
    executors = ["a", "b", "c"]
    moved = rebalanced(places, executors, cores * len(executors))

    def waves(placed: Sequence[str | None]) -> int:
        return max(-(-count // cores) for count in Counter(placed).values())

    after = [moved.get(subtask, place) for subtask, place in enumerate(places)]
    assert set(after) <= set(executors)
    assert waves(after) == min(waves(placed) for placed in product(executors, repeat=len(places)))
    assert all(executor != places[subtask] for subtask, executor in moved.items())
    if set(places) <= set(executors) and max(Counter(places).values()) <= cores:
        assert moved == {}


@pytest.mark.parametrize(
    ("conf", "several"),
    [
        ({"spark.master": "local[4]"}, False),
        ({"spark.master": "local"}, False),
        ({"spark.master": "local-cluster[3,1,1024]"}, True),
        ({"spark.master": "yarn"}, True),
        ({"spark.master": "yarn", "spark.executor.instances": "1"}, False),
        ({"spark.master": "k8s://x", "spark.dynamicAllocation.enabled": "true", "spark.executor.instances": "1"}, True),
        (
            {
                "spark.master": "yarn",
                "spark.dynamicAllocation.enabled": "true",
                "spark.dynamicAllocation.maxExecutors": "1",
            },
            False,
        ),
    ],
)
def test_placement_is_on_where_there_can_be_several_executors(conf: dict[str, str], several: bool) -> None:
    assert may_have_several_executors(conf) == several


@pytest.mark.parametrize(
    ("conf", "cause"),
    [
        ({}, "spark.shuffle.reduceLocality.enabled is not false"),
        ({"spark.shuffle.reduceLocality.enabled": "true"}, "spark.shuffle.reduceLocality.enabled is not false"),
        (statelog.spark_conf(), ""),
        ({**statelog.spark_conf(), "spark.locality.wait": "0s"}, "spark.locality.wait is 0"),
        ({**statelog.spark_conf(), "spark.locality.wait": "0", "spark.locality.wait.process": "3s"}, ""),
        ({**statelog.spark_conf(), "spark.locality.wait": "10s"}, ""),
        ({**statelog.spark_conf(), "spark.locality.wait.process": "0ms"}, "spark.locality.wait.process is 0"),
    ],
)
def test_settings_that_move_subtasks_are_named(conf: dict[str, str], cause: str) -> None:
    assert what_moves_subtasks(conf) == cause


@pytest.mark.parametrize("master", ["local-cluster[3,1,1024]", "local[2]"])
def test_without_the_settings_there_is_a_warning_and_no_placement(
    master: str, caplog: pytest.LogCaptureFixture
) -> None:
    conf = SimpleNamespace(getAll=lambda: [("spark.master", master)])
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(getConf=lambda: conf))

    assert make_placement(session, "counts", "1-0", 4, Options()) is None
    warned = [record.getMessage() for record in caplog.records]
    if master == "local[2]":
        assert warned == []
    else:
        assert "operator 'counts'" in warned[0]
        assert "spark.shuffle.reduceLocality.enabled is not false" in warned[0]
        assert "statelog.spark_conf()" in warned[0]


def test_the_option_is_one_of_three() -> None:
    for value in ("auto", "on", "off"):
        assert Options(placement=value).placement == value
    with pytest.raises(ConfigurationError, match="placement"):
        Options(placement="sticky")


def test_the_settings_are_a_copy() -> None:
    statelog.spark_conf().clear()
    assert statelog.spark_conf() == {"spark.shuffle.reduceLocality.enabled": "false", "spark.speculation": "false"}
    local = set(statelog.spark_conf(local_checkpoints=True).items()) - set(statelog.spark_conf().items())
    assert {name for name, _ in local} == {
        "spark.sql.streaming.checkpointFileManagerClass",
        "spark.hadoop.fs.file.impl",
    }
