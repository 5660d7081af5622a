"""The time of a task, by the parts of its work."""

from __future__ import annotations

import pytest

from statelog.rpc.messages import TaskTimes
from statelog.stopwatch import Part, Stopwatch
from tests.core.stopwatch_support import SetClock


def test_time_within_a_part_that_belongs_to_another_counts_once() -> None:
    clock = SetClock()
    stopwatch = Stopwatch(clock)
    clock.run(1)
    with stopwatch.counting(Part.PROCESSOR):
        clock.run(2)
        assert stopwatch.call(Part.READ, clock.run, 4) == 4
        with stopwatch.counting(Part.ENCODE):
            clock.run(8)
            with stopwatch.counting(Part.UPLOAD):
                clock.run(16)
        clock.run(32)
    clock.run(64)
    with stopwatch.counting(Part.WAIT):
        clock.run(128)
    assert TaskTimes.of(stopwatch) == TaskTimes(read_s=4, processor_s=34, encode_s=8, upload_s=16, wait_s=128)


def test_the_time_of_a_part_that_fails_counts() -> None:
    clock = SetClock()
    stopwatch = Stopwatch(clock)

    def fail() -> None:
        clock.run(3)
        raise OSError("no")

    with stopwatch.counting(Part.PROCESSOR):
        with pytest.raises(OSError, match="no"):
            stopwatch.call(Part.READ, fail)
        with pytest.raises(OSError, match="no"), stopwatch.counting(Part.ENCODE):
            fail()
        clock.run(1)
    assert TaskTimes.of(stopwatch) == TaskTimes(read_s=3, encode_s=3, processor_s=1)
