"""Which state a run may go on from: its own, of the same keys, up to the batch before its first."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from msgspec import structs

from statelog import ConfigurationError, CorruptionError, ErrorKind, StateMissingError
from statelog.checkpoint.admission import OperatorConfig, require_admission
from statelog.checkpoint.history import History
from statelog.log.entry import Checkpoint
from statelog.log.references import Base, BaseRange, Level
from statelog.operators.unkeyed.states import OperatorStateDescriptor, OperatorStateMode
from statelog.runs.key_groups import hash_range
from statelog.runs.schema import StateDescriptor, StateKind, StateSchema


def keyed_by(**fields: pa.DataType) -> bytes:
    return bytes(pa.schema(list(fields.items())).serialize())


RUN = OperatorConfig("query", "run-2", "op", 1, keyed_by(k=pa.int64()), [])


def checkpoint(batch: int, **changes: object) -> Checkpoint:
    before = Checkpoint(1, batch, 0, "query", "run-1", "op", 1, [], RUN.key_schema, [], 0, 0, b"")
    return structs.replace(before, **changes)


def history(*batches: int, **changes: object) -> History:
    return History(checkpoint(batch, **changes) for batch in batches)


def test_the_state_of_a_query_goes_on_in_its_next_run() -> None:
    require_admission(RUN, history(0, 1, 2), 3, None, "here")


@pytest.mark.parametrize("first_batch", [2, 1, 0])
def test_batches_that_exist_already_can_be_repeated(first_batch: int) -> None:
    require_admission(RUN, history(0, 1, 2), first_batch, None, "here")


def test_a_checkpoint_is_of_the_batch_that_spark_ran() -> None:
    """Another copy of the query, of the same id, may have run another batch of the number."""
    stored = history(0, 1, batch_time_ms=5_000)
    require_admission(RUN, stored, 2, 5_000, "here")
    require_admission(RUN, stored, 2, None, "here")
    with pytest.raises(ConfigurationError, match="another copy of the query wrote it") as caught:
        require_admission(RUN, stored, 2, 6_000, "here")
    assert caught.value.kind is ErrorKind.OTHER_OWNER
    assert "1970-01-01 00:00:05.000 UTC" in str(caught.value)


@pytest.mark.parametrize("owner", [{"query_id": "other"}, {"uid": "other"}])
@pytest.mark.parametrize("first_batch", [0, 3])
def test_the_state_of_another_query_or_operator_is_left_alone(owner: dict[str, str], first_batch: int) -> None:
    with pytest.raises(ConfigurationError, match="here: the state there belongs to operator") as caught:
        require_admission(RUN, history(0, 1, 2, **owner), first_batch, None, "here")
    assert caught.value.kind is ErrorKind.OTHER_OWNER


def test_a_query_that_starts_anew_may_have_other_keys() -> None:
    require_admission(RUN, history(0, 1, key_schema=keyed_by(k=pa.string())), 0, None, "here")


def test_a_query_that_goes_on_may_not_have_other_keys() -> None:
    with pytest.raises(ConfigurationError, match="keyed by \\(k string\\), this query by \\(k int64\\)") as caught:
        require_admission(RUN, history(0, 1, key_schema=keyed_by(k=pa.string())), 2, None, "here")
    assert caught.value.kind is ErrorKind.OTHER_SCHEMA


@pytest.mark.parametrize(("stored", "own"), [(b"", RUN.key_schema), (RUN.key_schema, b"")])
def test_keyed_state_and_operator_state_are_not_each_other(stored: bytes, own: bytes) -> None:
    with pytest.raises(ConfigurationError, match="the location holds") as caught:
        require_admission(replace(RUN, key_schema=own), history(0, key_schema=stored), 1, None, "here")
    assert caught.value.kind is ErrorKind.OTHER_SCHEMA


def items(mode: OperatorStateMode) -> StateSchema:
    return OperatorStateDescriptor("items", mode, pa.schema([("x", pa.int64())])).to_stored()


def test_operator_state_is_dealt_out_as_it_was() -> None:
    stored = history(0, key_schema=b"", states=[items(OperatorStateMode.LIST)])
    run = replace(RUN, key_schema=b"")
    require_admission(run, stored, 1, None, "here")
    require_admission(replace(run, states=[items(OperatorStateMode.LIST)]), stored, 1, None, "here")
    with pytest.raises(ConfigurationError, match="the processor declares"):
        require_admission(replace(run, states=[items(OperatorStateMode.UNION)]), stored, 1, None, "here")


def test_state_that_is_behind_is_not_gone_on_with() -> None:
    with pytest.raises(StateMissingError, match=r"needs checkpoint 3, but the newest is checkpoint 2\."):
        require_admission(RUN, history(0, 1, 2), 4, None, "here")


def test_state_that_was_never_there_is_not_taken_for_empty() -> None:
    for first_batch, is_first_after in ((1, True), (2, False)):
        with pytest.raises(StateMissingError, match="but there is no checkpoint") as caught:
            require_admission(RUN, History(), first_batch, None, "here")
        assert ("run no action" in str(caught.value)) == is_first_after
    require_admission(RUN, History(), 0, None, "here")


@pytest.mark.parametrize("first_batch", [5, 4, 1])
def test_what_is_not_retained_is_named(first_batch: int) -> None:
    kept = history(5, 6, key_schema=b"")
    run = replace(RUN, key_schema=b"")
    with pytest.raises(StateMissingError, match=f"needs checkpoint {first_batch - 1}, but the oldest .* checkpoint 5"):
        require_admission(run, kept, first_batch, None, "here")
    require_admission(run, kept, 6, None, "here")


def test_a_checkpoint_whose_materialized_state_is_forgotten_cannot_be_gone_on_from() -> None:
    """Its entry is there, but those before it, which said what it builds on, are not."""
    own = hash_range(0, 1)
    base = Base(0, 1, [Level(0, 3, b"", b"", own.first, own.last, [])])
    kept = History([checkpoint(2), checkpoint(3), checkpoint(4, base_ranges=[BaseRange(own.first, own.last, base)])])
    with pytest.raises(StateMissingError, match="needs checkpoint 2, but the oldest that is retained is checkpoint 4"):
        require_admission(RUN, kept, 3, None, "here")
    require_admission(RUN, kept, 5, None, "here")


def test_a_state_that_is_not_declared_any_more_is_no_hindrance() -> None:
    gone = StateDescriptor("gone", StateKind.VALUE, pa.schema([("x", pa.int64())])).to_stored()
    require_admission(RUN, history(0, states=[gone]), 1, None, "here")


def test_a_gap_is_damage() -> None:
    for first_batch in (0, 1, 4):
        with pytest.raises(CorruptionError, match="the log lacks checkpoint 2") as caught:
            require_admission(RUN, history(0, 1, 3), first_batch, None, "here")
        assert caught.value.kind is ErrorKind.OBJECT_MISSING
