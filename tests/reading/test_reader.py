"""``open_state``: a checkpoint that is read again and again while its query continues."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

import statelog
from statelog import ConfigurationError, PinExpiredError
from statelog.history import pins as held_pin
from statelog.storage import LocalStore
from statelog.testing.query import ManualClock
from tests.reading.story import KEYS, STATES, Story, rows, value_rows


@pytest.fixture
def query(tmp_path: Path) -> Story:
    made = Story(
        tmp_path / "query",
        parallelism=2,
        retained_checkpoints=2,
        materialization_interval_s=0.0,
        max_file_bytes=1,
        log_min_age_s=0.0,
    )
    made.run_batches(6, random.Random(1))
    return made


def test_a_reader_stays_at_its_checkpoint(query: Story) -> None:
    expected = query.models[5]
    with statelog.open_state(query.location) as reader:
        assert (reader.batch, reader.batch_time_ms, sorted(reader.states)) == (5, 1005, sorted(STATES))
        for _ in range(4):
            for state, rows_of in STATES.items():
                assert rows(reader.read(state).read_all()) == rows_of(expected)
            for key in KEYS:
                found = rows(reader.read("value", keys=[key]).read_all())
                assert found == [row for row in value_rows(expected) if row[:2] == key]
            query.run_batches(5, random.Random(2))
        assert len(statelog.list_pins(query.location)) == 1
    assert statelog.list_pins(query.location) == []
    with pytest.raises(ConfigurationError, match="is closed"):
        reader.read("value")


def test_a_second_look_up_of_a_key_reads_no_file(query: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    read = LocalStore.read

    def noted(store: LocalStore, name: str, **place: Any) -> bytes:
        calls.append(name)
        return read(store, name, **place)

    monkeypatch.setattr(LocalStore, "read", noted)
    with statelog.open_state(query.location) as reader:
        first = reader.read("map", keys=KEYS[:3]).read_all()
        assert calls
        calls.clear()
        assert reader.read("map", keys=KEYS[:3]).read_all() == first
    assert calls == []


def test_a_reader_that_rested_goes_on_while_its_checkpoint_is_retained(
    query: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(time.time())
    monkeypatch.setattr(held_pin, "SystemClock", lambda: clock)
    expected = value_rows(query.models[5])
    with statelog.open_state(query.location) as reader:
        assert rows(reader.read("value").read_all()) == expected
        clock.advance(1000)
        assert rows(reader.read("value").read_all()) == expected
        begun = reader.read("value")
        clock.advance(1000)
        with pytest.raises(PinExpiredError, match="lasted 300 s"):
            begun.read_all()
        query.run_batches(3, random.Random(3))
        with pytest.raises(PinExpiredError, match="no longer retained"):
            reader.read("value").read_all()
