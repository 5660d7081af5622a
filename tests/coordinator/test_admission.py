"""Which state a run may continue from: its own, of the same keys, up to the batch before its first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs

from statelog import ConfigurationError, CorruptionError, ErrorKind, StateMissingError
from statelog.coordinator.admission import OperatorConfig, admit, require_distinct
from statelog.history.query_history import QueryHistory
from statelog.log.entry import Checkpoint, Claim
from statelog.log.references import Base, BaseRange, Level
from statelog.operators.unkeyed.states import OperatorStateDescriptor, OperatorStateMode
from statelog.runs.key_groups import hash_range
from statelog.runs.schema import StateDescriptor, StateKind, StateSchema
from tests.entries import checkpoint_of, entry_of, query_of


def keyed_by(**fields: pa.DataType) -> bytes:
    return bytes(pa.schema(list(fields.items())).serialize())


RUN = OperatorConfig("query", "run-2", "op", 1, keyed_by(k=pa.int64()), [])


def checkpoint(batch: int, **changes: object) -> Checkpoint:
    usual: dict[str, Any] = {"run_id": "run-1", "key_schema": RUN.key_schema, "token": b"%d" % batch}
    return checkpoint_of(batch, **usual | {"begins": batch == 0, "identity": "op-1"} | changes)


def history(*batches: int, **changes: object) -> QueryHistory:
    return query_of(checkpoint(batch, **changes) for batch in batches)


def require_admission(
    run: OperatorConfig, query: QueryHistory, first_batch: int, time_before_ms: int | None = None
) -> dict[str, str]:
    """The identities of the operators that have state."""
    return admit(query, [run], first_batch, time_before_ms, "here")


def test_the_state_of_a_query_goes_on_in_its_next_run() -> None:
    assert require_admission(RUN, history(0, 1, 2), 3) == {"op": "op-1"}


@pytest.mark.parametrize("first_batch", [2, 1, 0])
def test_batches_that_exist_already_can_be_repeated(first_batch: int) -> None:
    require_admission(RUN, history(0, 1, 2), first_batch)


def test_a_checkpoint_is_of_the_batch_that_spark_ran() -> None:
    """Another copy of the query, of the same id, may have run another batch of the number."""
    stored = history(0, 1, batch_time_ms=5_000)
    require_admission(RUN, stored, 2, 5_000)
    require_admission(RUN, stored, 2)
    with pytest.raises(ConfigurationError, match="another copy of the query wrote it") as caught:
        require_admission(RUN, stored, 2, 6_000)
    assert caught.value.kind is ErrorKind.OTHER_OWNER
    assert "1970-01-01 00:00:05.000 UTC" in str(caught.value)


@pytest.mark.parametrize("first_batch", [0, 3])
def test_the_state_of_another_query_is_left_alone(first_batch: int) -> None:
    expected = "here: the state there belongs to query other, not to query query"
    with pytest.raises(ConfigurationError, match=expected) as caught:
        require_admission(RUN, history(0, 1, 2, query_id="other"), first_batch)
    assert caught.value.kind is ErrorKind.OTHER_OWNER


def test_a_query_that_starts_anew_may_have_other_keys() -> None:
    assert require_admission(RUN, history(0, 1, key_schema=keyed_by(k=pa.string())), 0) == {}


def test_a_query_that_goes_on_may_not_have_other_keys() -> None:
    with pytest.raises(ConfigurationError, match="keyed by \\(k string\\), but this query by \\(k int64\\)") as caught:
        require_admission(RUN, history(0, 1, key_schema=keyed_by(k=pa.string())), 2)
    assert caught.value.kind is ErrorKind.OTHER_SCHEMA


@pytest.mark.parametrize(("stored", "own"), [(b"", RUN.key_schema), (RUN.key_schema, b"")])
def test_keyed_state_and_operator_state_are_not_each_other(stored: bytes, own: bytes) -> None:
    with pytest.raises(ConfigurationError, match="the location holds") as caught:
        require_admission(replace(RUN, key_schema=own), history(0, key_schema=stored), 1)
    assert caught.value.kind is ErrorKind.OTHER_SCHEMA


def items(mode: OperatorStateMode) -> StateSchema:
    return OperatorStateDescriptor("items", mode, pa.schema([("x", pa.int64())])).to_stored()


def test_operator_state_is_dealt_out_as_it_was() -> None:
    stored = history(0, key_schema=b"", states=[items(OperatorStateMode.LIST)])
    run = replace(RUN, key_schema=b"")
    require_admission(run, stored, 1)
    require_admission(replace(run, states=[items(OperatorStateMode.LIST)]), stored, 1)
    with pytest.raises(ConfigurationError, match="the processor declares"):
        require_admission(replace(run, states=[items(OperatorStateMode.UNION)]), stored, 1)


def test_state_that_is_behind_is_not_gone_on_with() -> None:
    with pytest.raises(StateMissingError, match=r"needs checkpoint 3, but the newest is checkpoint 2\."):
        require_admission(RUN, history(0, 1, 2), 4)


def test_state_that_was_never_there_is_not_taken_for_empty() -> None:
    for first_batch, is_first_after in ((1, True), (2, False)):
        with pytest.raises(StateMissingError, match="but there is no checkpoint") as caught:
            require_admission(RUN, QueryHistory(), first_batch)
        assert ("ran no action" in str(caught.value)) == is_first_after
    require_admission(RUN, QueryHistory(), 0)


@pytest.mark.parametrize("first_batch", [5, 4, 1])
def test_what_is_not_retained_is_named(first_batch: int) -> None:
    kept = history(5, 6, key_schema=b"")
    run = replace(RUN, key_schema=b"")
    with pytest.raises(StateMissingError, match=f"needs checkpoint {first_batch - 1}, but the oldest .* checkpoint 5"):
        require_admission(run, kept, first_batch)
    require_admission(run, kept, 6)


def test_a_checkpoint_whose_materialized_state_is_forgotten_cannot_be_gone_on_from() -> None:
    """Its entry is there, but those before it, which said what it builds on, are not."""
    own = hash_range(0, 1)
    base = Base(0, 1, [Level(0, 3, b"", b"", own.first, own.last, [])])
    kept = query_of([checkpoint(2), checkpoint(3), checkpoint(4, base_ranges=[BaseRange(own.first, own.last, base)])])
    with pytest.raises(StateMissingError, match="needs checkpoint 2, but the oldest that is retained is checkpoint 4"):
        require_admission(RUN, kept, 3)
    require_admission(RUN, kept, 5)


def test_a_state_that_is_not_declared_any_more_is_no_hindrance() -> None:
    gone = StateDescriptor("gone", StateKind.VALUE, pa.schema([("x", pa.int64())])).to_stored()
    require_admission(RUN, history(0, states=[gone]), 1)


def test_a_gap_is_damage() -> None:
    for first_batch in (0, 1, 4):
        with pytest.raises(CorruptionError, match="the log lacks checkpoint 2") as caught:
            require_admission(RUN, history(0, 1, 3), first_batch)
        assert caught.value.kind is ErrorKind.OBJECT_MISSING


# ---- Several operators ----

OTHER = replace(RUN, uid="other")


def of_two(*batches: int) -> QueryHistory:
    """A query whose second operator begins with the last of some batches."""
    return QueryHistory(
        entry_of(
            checkpoint(batch),
            *(
                [structs.replace(checkpoint(batch), uid="other", identity="other-2", begins=True)]
                * (batch == batches[-1])
            ),
        )
        for batch in batches
    )


def test_operators_that_the_checkpoint_before_lacks_begin_their_state() -> None:
    assert admit(of_two(0, 1, 2), [RUN, OTHER], 3, None, "here") == {"op": "op-1", "other": "other-2"}
    assert admit(of_two(0, 1, 2), [RUN, OTHER], 2, None, "here") == {"op": "op-1"}, "it is repeated, and starts over"
    assert admit(of_two(0, 1, 2), [RUN, OTHER], 0, None, "here") == {}
    assert admit(history(0, 1), [RUN, OTHER], 2, None, "here") == {"op": "op-1"}


def test_an_operator_that_the_checkpoint_before_has_is_not_left_behind() -> None:
    with pytest.raises(ConfigurationError, match="at batch 2 the query also has an operator 'other'") as caught:
        admit(of_two(0, 1, 2), [RUN], 3, None, "here")
    assert caught.value.kind is ErrorKind.OPERATOR_REMOVED
    assert "statelog.forget(checkpointLocation, 'other')" in caught.value.hint
    assert admit(of_two(0, 1, 2), [RUN], 2, None, "here") == {"op": "op-1"}, "it did not have it yet"


def test_every_operator_has_to_fit_its_state() -> None:
    for first, second in ((RUN, replace(OTHER, key_schema=b"")), (replace(RUN, key_schema=b""), OTHER)):
        with pytest.raises(ConfigurationError, match="the location holds keyed state"):
            admit(of_two(0, 1), [first, second], 2, None, "here")


def news(**values: Any) -> Claim:
    return structs.replace(Claim(2, "query", "tool", b"tool", 0), **values)


def test_an_operator_that_has_ended_may_be_left_out_and_begins_anew_if_it_is_not() -> None:
    query = QueryHistory([*of_two(0, 1, 2).entries, news(ended=["other-2"])])
    assert admit(query, [RUN], 3, None, "here") == {"op": "op-1"}
    assert admit(query, [RUN, OTHER], 3, None, "here") == {"op": "op-1"}


def test_an_operator_goes_by_its_last_name() -> None:
    query = QueryHistory([*of_two(0, 1, 2).entries, news(renames={"op-1": "new"}), news(renames={"op-1": "newest"})])
    assert admit(query, [replace(RUN, uid="newest"), OTHER], 3, None, "here") == {"newest": "op-1", "other": "other-2"}
    for uid in ("op", "new"):
        with pytest.raises(ConfigurationError, match="also has an operator 'newest'"):
            admit(query, [replace(RUN, uid=uid), OTHER], 3, None, "here")


def test_names_may_be_exchanged() -> None:
    query = QueryHistory([*of_two(0, 1, 2).entries, news(renames={"op-1": "other", "other-2": "op"})])
    assert admit(query, [RUN, OTHER], 3, None, "here") == {"op": "other-2", "other": "op-1"}


def test_a_query_without_a_checkpoint_begins_at_a_later_batch_if_its_user_says_so() -> None:
    assert admit(QueryHistory([news(begins_at=7)]), [RUN], 7, None, "here") == {}
    assert admit(QueryHistory([news(begins_at=7), news()]), [RUN], 7, None, "here") == {}
    assert admit(QueryHistory([news(begins_at=5), news(begins_at=7)]), [RUN], 7, None, "here") == {}
    for claims in ([], [news()], [news(begins_at=7, query_id="another")]):
        with pytest.raises(StateMissingError, match="there is no checkpoint"):
            admit(QueryHistory(claims), [RUN], 7, None, "here")


def test_a_later_batch_is_none_that_the_user_meant() -> None:
    """Batch 7 is over for Spark and has no checkpoint: its rows would be missing in the state."""
    with pytest.raises(StateMissingError, match="there is no checkpoint"):
        admit(QueryHistory([news(begins_at=7)]), [RUN], 8, None, "here")


def test_state_that_is_there_is_not_replaced_because_the_user_said_so_before() -> None:
    query = QueryHistory([news(begins_at=7), *history(0).entries])
    with pytest.raises(StateMissingError, match="the newest is checkpoint 0"):
        admit(query, [RUN], 7, None, "here")


def test_a_query_that_went_back_goes_on_from_there() -> None:
    entries = of_two(0, 1, 2).entries
    query = QueryHistory([*entries, news(follows=entries[1].id)])
    assert admit(query, [RUN], 2, None, "here") == {"op": "op-1"}
    with pytest.raises(StateMissingError, match="needs checkpoint 2, but the newest is checkpoint 1"):
        admit(query, [RUN, OTHER], 3, None, "here")


def test_two_operators_of_one_name_are_refused() -> None:
    require_distinct([RUN, OTHER])
    with pytest.raises(ConfigurationError, match="two stateful operators named 'op'") as caught:
        require_distinct([RUN, OTHER, RUN])
    assert caught.value.kind is ErrorKind.UID_REQUIRED
