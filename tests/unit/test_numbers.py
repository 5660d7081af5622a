"""Numbers that users pass: which types and ranges are refused, and how, and that NumPy's are fine."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statelog
from statelog import ConfigurationError, Options
from statelog.numbers import checked_seconds, checked_whole
from tests.options import make_options

NUMBERS = {field.name: field.default for field in fields(Options) if type(field.default) in (int, float)}
WHOLE = [name for name, default in NUMBERS.items() if type(default) is int]
OPTIONAL = ["inline_budget_bytes", "restore_deadline_s", "heartbeat_s"]
WRONG = ["10", "", b"1", float("nan"), float("inf"), -1, True, [], 1j, np.float64("nan")]


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", [*NUMBERS, *OPTIONAL])
def test_an_option_that_is_a_number_takes_nothing_else(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^Option {name} is .*Hint: It must be .*number"):
        make_options(**{name: value})


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_number_is_no_fraction(name: str) -> None:
    for value in (2.5, 3.0, np.float32(3)):
        given: dict[str, Any] = {name: value}
        with pytest.raises(ConfigurationError, match="It must be a whole number"):
            make_options(**given)


@pytest.mark.parametrize("name", list(NUMBERS))
def test_none_is_a_value_of_few_options(name: str) -> None:
    given: dict[str, Any] = {name: None}
    with pytest.raises(ConfigurationError, match=f"Option {name} is None"):
        make_options(**given)


@pytest.mark.parametrize("name", [*NUMBERS, *OPTIONAL])
def test_numbers_of_numpy_become_pythons(name: str) -> None:
    for number in (np.int64(7), np.int32(7), 7):
        given: dict[str, Any] = {name: number}
        found = getattr(make_options(**given), name)
        assert found == 7
        assert type(found) is (int if name in WHOLE or name.endswith("_bytes") else float)


def test_retained_s_takes_numpys_numbers() -> None:
    given: Any = {np.int64(60): np.float32(3600)}
    assert Options(retained_s=given).retained_s == {60.0: 3600.0}


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("observer", "me", "an instance of statelog.Observer"),
        ("local_directory", 7, "the path of a directory"),
        ("local_directory", " ", "the path of a directory"),
        ("retained_checkpoints", 1, "a whole number, 2 or more"),
        ("heartbeat_s", 0.05, "None, or a finite number, 0.1 or more"),
        ("upload_timeout_s", 0, "a finite number, more than 0"),
    ],
)
def test_the_hint_says_what_is_valid(option: str, value: Any, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"It must be .*{hint}"):
        make_options(**{option: value})


@pytest.mark.parametrize("value", ["4", 2.0, 0, 32769, True, None, np.float64(2)], ids=repr)
def test_what_is_no_parallelism(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="^parallelism is .* Hint: .* a whole number, from 1 to 32768"):
        checked_whole(value, "parallelism", 1, 32768)


def test_a_whole_number_is_given_back_as_pythons() -> None:
    assert type(checked_whole(np.int16(4), "parallelism", 1)) is int


@pytest.mark.parametrize("value", ["60", None, True, float("inf")], ids=repr)
def test_what_is_no_time_in_seconds(value: Any, tmp_path: Path) -> None:
    for call in (
        lambda: statelog.delete_orphans(str(tmp_path), min_age_s=value),
        lambda: statelog.list_orphans(str(tmp_path), min_age_s=value),
        lambda: checked_seconds(value, "min_age_s", is_positive=True),
    ):
        with pytest.raises(ConfigurationError, match="^min_age_s is .*a (finite )?number of seconds"):
            call()


def test_a_time_limit_is_positive() -> None:
    assert checked_seconds(np.float32(-60), "min_age_s") == -60.0
    assert checked_seconds("2 minutes", "lasts_s") == checked_seconds(timedelta(minutes=2), "lasts_s") == 120.0
    for value in (0, -1.0):
        with pytest.raises(ConfigurationError, match="a finite number of seconds, more than 0"):
            checked_seconds(value, "timeout_s", is_positive=True)


@pytest.mark.parametrize("value", ["5", 1.5, True, -2], ids=repr)
def test_what_is_no_batch(value: Any, tmp_path: Path) -> None:
    place = str(tmp_path)
    for call in (
        lambda: statelog.rewind(place, to=value),
        lambda: statelog.branch(place, place, at=value),
        lambda: statelog.savepoint(place, str(tmp_path / "saved"), batch=value),
    ):
        with pytest.raises(ConfigurationError, match="^(to|at|batch) is .* Hint: It must be a whole number"):
            call()
