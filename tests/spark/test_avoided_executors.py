"""Which executors get no subtasks after local files could not be kept on their host."""

from __future__ import annotations

import pytest

from statelog.spark.driver.avoided_executors import AvoidedExecutors
from statelog.testing.query import ManualClock

HOSTS = {"0": "a", "1": "a", "2": "b", "3": "c", "driver": "d"}


@pytest.mark.parametrize(
    ("failed", "present", "others"),
    [
        ("", "0123", "0123"),
        ("0", "0123", "23"),  # a disk is its host's
        ("02", "0123", "3"),
        ("0", "01", "1"),  # there is no other host
        ("023", "0123", "1"),
        ("01", "01", "01"),  # there is no other executor
        ("2", "013", "013"),
        ("2", "019", "019"),  # one that came just now, and whose host is not known yet
    ],
)
def test_executors_on_other_hosts_come_first(failed: str, present: str, others: str) -> None:
    avoided = AvoidedExecutors(ManualClock())
    for executor in failed:
        avoided.note(executor, HOSTS[executor])
    assert avoided.others(present, lambda: HOSTS) == list(others)


def test_one_that_replaces_another_on_the_host_is_avoided_too() -> None:
    avoided = AvoidedExecutors(ManualClock())
    avoided.note("0", "a")
    assert avoided.others(["2", "7"], lambda: {"2": "b", "7": "a"}) == ["2"]


def test_hosts_are_looked_up_only_if_one_is_avoided() -> None:
    clock = ManualClock()
    avoided = AvoidedExecutors(clock)

    def hosts() -> dict[str, str]:
        raise AssertionError("looked up")

    assert avoided.others(["0"], hosts) == ["0"]
    avoided.note("0", "a")
    with pytest.raises(AssertionError, match="looked up"):
        avoided.others(["0"], hosts)
    clock.advance(600)
    assert avoided.others(["0"], hosts) == ["0"]


def test_a_host_is_avoided_for_a_time_since_its_last_failure() -> None:
    clock = ManualClock()
    avoided = AvoidedExecutors(clock, avoided_s=10)
    assert avoided.note("0", "a") == 10
    clock.advance(6)
    assert avoided.note("0", "a") is None, "it is known"
    assert avoided.note("1", "a") == 10, "another executor of the host"
    clock.advance(9)
    assert avoided.others(["0", "1", "2"], lambda: HOSTS) == ["2"]
    clock.advance(1)
    assert avoided.others(["0", "1", "2"], lambda: HOSTS) == ["0", "1", "2"]


def test_a_host_that_fails_again_is_avoided_for_longer() -> None:
    clock = ManualClock()
    avoided = AvoidedExecutors(clock, avoided_s=10, longest_s=35)
    times_s = []
    for _ in range(4):
        times_s.append(avoided.note("0", "a"))
        clock.advance(times_s[-1] or 0)
    assert times_s == [10, 20, 35, 35]
    assert avoided.note("2", "b") == 10
