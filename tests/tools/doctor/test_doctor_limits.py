"""The doctor's checks: each becomes findings within its time limit, whatever happens to it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from statelog.errors import ConfigurationError
from statelog.tools.doctor.finding import Check, Findings, Place, run_limited

PLACE = Place("driver", "here")


def check(run: object, cancel: object = None) -> Check:
    return Check("port", PLACE, run, "Look at the network.", cancel)  # type: ignore[arg-type]  # some are of another type


def test_findings_come_in_the_order_of_the_checks() -> None:
    started = threading.Event()

    def first() -> Findings:
        assert started.wait(60), "the checks do not run side by side"
        yield PLACE.ok("a", "1")
        yield PLACE.ok("a", "2")

    def second() -> Findings:
        started.set()
        yield PLACE.ok("b", "3")

    assert [one.found for one in run_limited([check(first), check(second)], 60)] == ["1", "2", "3"]


def test_an_error_of_statelog_says_what_to_do() -> None:
    def fail() -> Findings:
        yield PLACE.ok("port", "so far")
        raise ConfigurationError("It is closed.", hint="Open it.")

    _, found = run_limited([check(fail)], 60)
    assert (found.level, found.check, found.found, found.remedy) == ("error", "port", "It is closed.", "Open it.")


@pytest.mark.parametrize("error", [ZeroDivisionError("first line\nsecond line"), SystemExit(3), OSError()])
def test_any_other_error_is_a_finding(error: BaseException) -> None:
    def fail() -> Findings:
        raise error
        yield

    [found] = run_limited([check(fail)], 60)
    assert (found.level, found.host) == ("error", "here")
    assert f"could not be completed: {type(error).__name__}" in found.found
    assert "second line" not in found.found


def test_a_check_that_takes_too_long_is_told_to_end_and_removes_what_it_wrote() -> None:
    go_on, went_on, removed = threading.Event(), threading.Event(), threading.Event()

    def hang() -> Findings:
        try:
            yield PLACE.ok("port", "written")
            go_on.wait(60)
            yield PLACE.ok("port", "too late")
            went_on.set()
        finally:
            removed.set()

    found = run_limited([check(hang)], 0.05)
    assert [one.found for one in found] == ["written", "The check was not finished after 0.05 s."]
    assert found[1].remedy == "Look at the network."
    assert not removed.is_set()
    go_on.set()
    assert removed.wait(60)
    assert not went_on.is_set()


def test_checks_that_hang_have_one_time_limit_together() -> None:
    go_on = threading.Event()

    def hang() -> Findings:
        go_on.wait(60)
        yield PLACE.ok("port", "too late")

    begun_s = time.monotonic()
    found = run_limited([check(hang)] * 20, 0.05)
    took_s = time.monotonic() - begun_s
    go_on.set()
    assert {one.found for one in found} == {"The check was not finished after 0.05 s."}
    assert took_s < 4


def test_a_check_that_can_be_cancelled_is_and_its_end_is_awaited() -> None:
    cancelled, ended = threading.Event(), threading.Event()

    def wait() -> Findings:
        assert cancelled.wait(60)
        time.sleep(0.2)
        ended.set()
        raise RuntimeError("cancelled")
        yield

    def cancel() -> None:
        cancelled.set()
        raise RuntimeError("the job has ended by itself")

    [found] = run_limited([check(wait, cancel)], 0.05)
    assert found.found == "The check was not finished after 0.05 s."
    assert ended.is_set()


def test_an_interruption_ends_the_checks_first() -> None:
    removed, cancelled = threading.Event(), threading.Event()

    def wait() -> Findings:
        try:
            yield PLACE.ok("port", "written")
            os.kill(os.getpid(), signal.SIGINT)
            assert cancelled.wait(60)
        finally:
            time.sleep(0.2)
            removed.set()

    with pytest.raises(KeyboardInterrupt):
        run_limited([check(wait, cancelled.set)], 60)
    assert removed.is_set()
