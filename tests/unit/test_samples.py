"""Samples of input rows: which are stored, which stay, and that none is in the way of a batch."""

from __future__ import annotations

import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from pyspark.sql.types import LongType, StringType, StructField, StructType

import statelog
from statelog import ConfigurationError, CorruptionError, Options, StateMissingError, Step
from statelog.aggregates.build import KeyedDefinition, plan_deduplication
from statelog.checkpoint.batch import Batch, BatchTime
from statelog.checkpoint.garbage import Inventory
from statelog.checkpoint.history import History
from statelog.checkpoint.kept_samples import KeptSamples
from statelog.checkpoint.sample import (
    Sample,
    SampledOperator,
    SampleHeader,
    decode_sample,
    encode_sample,
    sample_folder,
    sample_name,
)
from statelog.convert.types import key_schema
from statelog.storage import LocalStore
from statelog.testing import Harness
from statelog.testing.clock import ManualClock
from statelog.testing.faults import Call, Fault, FaultPlan
from statelog.testing.harness import parts_of
from tests.reading.replayed import OUTPUT, USERS, Commands, Sampled, sample_objects
from tests.unit.test_history import checkpoint, segment

ROWS = [(user, "append", number) for number, user in enumerate(USERS)]
OPERATOR = SampledOperator(columns=["user", "n"], key_columns=[0], output="{}", session_zone="UTC", time_mode="None")


def batches(query: Sampled) -> set[int]:
    """The batches with samples."""
    return {batch for batch, _ in query.samples()}


# ---- Which stay ----


def test_those_of_the_newest_certain_batches_stay() -> None:
    with Sampled(sample_batches=2, parallelism=3) as query:
        for batch in range(6):
            query.run(ROWS)
            assert batches(query) == {batch, batch - 1, batch - 2} & set(range(6))
        assert len(query.samples()) == len({subtask for _, subtask in query.samples()}) * 3


def test_a_subtask_without_rows_has_none() -> None:
    with Sampled(parallelism=3) as query:
        query.run([("ann", "set", 1)])
        query.run([])
        assert len(query.samples()) == 1
        assert statelog.replay(query.location, 0, "ann", Commands()).is_equal


def test_without_the_option_nothing_is_written_and_one_list_made() -> None:
    calls: list[Call] = []

    class Noting(FaultPlan):
        def fault(self, call: Call) -> None:
            if "/samples" in call.name:
                calls.append(call)

    with Sampled(sample_batches=0, storeFaults=Noting()) as query:
        for _ in range(4):
            query.run(ROWS)
        assert [call.operation for call in calls] == ["list"]


@pytest.mark.parametrize("parallelism", [1, 2, 5])
def test_the_next_start_keeps_them(parallelism: int) -> None:
    with Sampled(sample_batches=3, parallelism=2) as query:
        for _ in range(5):
            query.run(ROWS)
        query.restart(parallelism=parallelism, keepLocal=False)
        assert batches(query) == {2, 3, 4}
        query.run(ROWS)
        assert batches(query) == {2, 3, 4, 5}
        for batch in (2, 5):
            assert statelog.replay(query.location, batch, "bob", Commands()).is_equal
        query.run(ROWS)
        assert batches(query) == {3, 4, 5, 6}


@pytest.mark.parametrize("repeated", [0, 1])
@pytest.mark.parametrize("sample_batches", [0, 1])
def test_fewer_stay_after_a_start_with_a_smaller_option(sample_batches: int, repeated: int) -> None:
    """Also if it repeats the last batch, whose checkpoint there is."""
    with Sampled(sample_batches=4) as query:
        for _ in range(5):
            query.run(ROWS)
        saved = query.snapshot()
    earlier = replace(saved.query, next_batch=5 - repeated)
    saved = replace(saved, query=earlier, options=Options(sample_batches=sample_batches))
    with Sampled.restore(saved, Commands()) as later:
        later.push(ROWS)
        stored = {int(name.split("/")[-1].partition("-")[0]) for name in sample_objects(later)}
        assert stored == ({4 - repeated, 5 - repeated} if sample_batches else set())


@pytest.mark.parametrize("step", [step for step in Step if step not in (Step.MERGING, Step.MATERIALIZING)])
@pytest.mark.parametrize("driver", [False, True])
def test_nothing_is_left_after_crashes(step: Step, driver: bool) -> None:
    """Attempts that do not count leave samples; these go once the batch is certain, or with the next start."""
    with Sampled(sample_batches=2, parallelism=2, options={"materialization_interval_s": 0.0}) as query:
        for number in range(4):
            query.run(ROWS)
            query.crash(step, driver=driver, parallelism=2 + number % 2)
        for _ in range(4):
            query.run(ROWS)
        assert query.crashes > 0
        assert batches(query) <= {5, 6, 7}
        assert statelog.list_orphans(query.location, min_age_s=0, clock=ManualClock(1e12)) == []
        names = sample_objects(query)
        assert len(names) == len(query.samples()), "one for each subtask and batch"


def test_attempts_of_a_batch_that_was_given_up_are_orphans() -> None:
    with Sampled(sample_batches=2, parallelism=1) as query:
        for _ in range(3):
            query.run(ROWS)
        left = "main/samples/1/0/2-999.arrow"
        store = LocalStore(query.location)
        store.put(left, b"of an attempt that no checkpoint names")
        found = statelog.list_orphans(query.location, min_age_s=0, clock=ManualClock(1e12))
        assert [info.name for info in found] == [left]
        for age_s, count in ((64, 1), (63, 0)):
            clock = ManualClock(found[0].modified_s + age_s)
            assert len(statelog.list_orphans(query.location, min_age_s=64, clock=clock)) == count
        assert statelog.delete_orphans(query.location, min_age_s=0, clock=ManualClock(1e12)) == [], "it may be at work"
        before = set(query.objects())
        query.restart()
        assert before - set(query.objects()) == {left, "main/samples/1/0/0-1.arrow"}


def test_delete_orphans_deletes_those_of_fenced_starts() -> None:
    with Sampled(sample_batches=3, parallelism=1) as query:
        for _ in range(3):
            query.run(ROWS)
        query.restart()
        query.run(ROWS)
        left = "main/samples/1/0/2-999.arrow"
        store = LocalStore(query.location)
        store.put(left, b"of an attempt that no checkpoint names")
        before = set(query.objects())
        found = statelog.delete_orphans(query.location, min_age_s=0, clock=ManualClock(1e12))
        assert [info.name for info in found] == [left]
        assert before - set(query.objects()) == {left}
        assert batches(query) == {0, 1, 2, 3}


def test_a_rewound_query_gives_up_those_of_the_batches_that_it_repeats() -> None:
    with Sampled(sample_batches=3, parallelism=1) as query:
        for _ in range(5):
            query.run(ROWS)
        saved = query.snapshot()
    with Sampled.restore(replace(saved, query=replace(saved.query, next_batch=3)), Commands()) as later:
        for _ in range(2):
            later.push(ROWS)
        names = sample_objects(later)
        assert {name.split("/")[2] for name in names if "/3-" in name or "/4-" in name} == {"2"}


def test_of_the_samples_that_exist_those_of_the_newest_batches_are_kept(tmp_path: Path) -> None:
    def name(epoch: int, batch: int, attempt: int) -> str:
        return f"op/samples/{epoch}/0/{batch}-{attempt}.arrow"

    store, kept = LocalStore(tmp_path), KeptSamples(LocalStore(tmp_path), "op", 2)
    assert not kept.need(name(1, 0, 0))
    for batch, attempt in ((0, 0), (1, 0), (2, 0), (2, 9)):
        store.put(name(1, batch, attempt), b"x")
    history = History([checkpoint(batch, segment(0), segment(1), parallelism=2) for batch in range(3)])
    assert kept.open(history, 3) == [name(1, 0, 0), name(1, 2, 9)], "the second subtask has none"
    assert [kept.need(name(1, batch, 0)) for batch in range(3)] == [False, True, True]
    durable = structs.replace(checkpoint(3, structs.replace(segment(0), attempt=7)), epoch=2)
    assert kept.certain(Batch(3, BatchTime(0, 0), {6: 0, 7: 0}, durable=durable), 2) == [name(1, 1, 0), name(2, 3, 6)]
    assert [kept.need(name(1, 2, 0)), kept.need(name(2, 3, 7))] == [True, True]


def test_the_gate_holds_back_a_sample_that_is_kept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    inventory = Inventory(store, "op", "op", Options(sample_batches=1), ManualClock(0), deletes_in_background=False)
    newest = checkpoint(4, structs.replace(segment(0), attempt=7))
    names = [sample_name(sample_folder("op", 1, 0), 4, attempt) for attempt in (7, 8)]
    for name in names:
        store.put(name, b"x")
    inventory.open([newest], 2, "run", ManualClock(0))
    inventory.deleter.delete(inventory.samples.open(inventory.history, 5))
    assert [info.name for info in store.list()] == names[:1]
    inventory.deleter.delete(names)
    assert [info.name for info in store.list()] == names[:1]
    assert inventory.samples.open(History([newest]), 6) == names[:1]


# ---- What is in the way of a batch ----


def test_large_rows_are_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with Sampled(parallelism=1, options={"sample_max_bytes": 2000}) as query:
        query.run([("ann", "append", 1)])
        assert "left out" not in caplog.text
        texts = [random.Random(number).randbytes(250).hex() for number in range(10)]
        for _ in range(3):
            query.run([("ann", text, number) for number, text in enumerate(texts)])
        warnings = [record.message for record in caplog.records if "left out of its sample" in record.message]
        assert len(warnings) == 2, "one for each of the two workers"
        assert "sample_max_bytes=2000" in warnings[0]
        assert statelog.replay(query.location, 0, "ann", Commands()).is_equal
        with pytest.raises(StateMissingError, match=r"left out, because its rows took 5,\d+ bytes.*sample_max_bytes"):
            statelog.replay(query.location, 2, "ann", Commands())
        rows = pa.table({"user": ["ann"] * 10, "command": texts, "n": range(10)})
        assert statelog.replay(query.location, 2, "ann", Commands(), rows=rows).is_equal
        sizes = {info.name: info.size_bytes for info in LocalStore(query.location).list() if "/samples/" in info.name}
        assert len(sizes) == 4
        assert max(sizes.values()) < 2500


@pytest.mark.parametrize("fewer_bytes", [0, 1])
def test_rows_of_as_many_bytes_as_a_sample_may_have_are_stored(
    fewer_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with Sampled(parallelism=1, options={"sample_max_bytes": 1}) as query:
        query.run(ROWS)
    [size_bytes] = {int(size) for size in re.findall(r"its input rows take (\d+) bytes", caplog.text)}
    caplog.clear()
    with Sampled(parallelism=1, options={"sample_max_bytes": size_bytes - fewer_bytes}) as query:
        query.run(ROWS)
    assert ("left out" in caplog.text) == (fewer_bytes > 0)


def test_a_store_that_does_not_take_samples_fails_no_batch(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(FaultPlan):
        def fault(self, call: Call) -> Fault | None:
            return Fault() if call.operation == "put" and "/samples/" in call.name else None

    with Sampled(storeFaults=Refusing()) as query:
        query.run(ROWS)
        query.run(ROWS)
        assert query.samples() == set()
        assert query.checkpoints[-1].batch == 1
        assert "could not be stored" in caplog.text
        with pytest.raises(StateMissingError, match="no sample of the rows of subtask"):
            statelog.replay(query.location, 1, "ann", Commands(), output=OUTPUT)


@pytest.mark.parametrize("seed", range(3))
def test_faults_of_requests_about_samples(seed: int) -> None:
    rng = random.Random(seed)

    class Failing(FaultPlan):
        def fault(self, call: Call) -> Fault | None:
            is_failing = call.operation in ("put", "delete") and "/samples/" in call.name and rng.random() < 0.3
            return Fault(rng.choice(["before", "after"])) if is_failing else None

    with Sampled(sample_batches=2, storeFaults=Failing()) as query:
        for number in range(12):
            query.run([("ann", "append", number)])
        assert query.crashes == 0
        assert query.list("list", "ann") == [(number + more,) for number in range(12) for more in (0, 1)]
        query.restart()
        assert batches(query) <= {9, 10, 11}


def test_ready_made_operators_store_none_and_are_not_replayed() -> None:
    schema = StructType([StructField("user", StringType()), StructField("n", LongType())])
    definition = KeyedDefinition(schema, [0], key_schema([schema["user"]]), None, is_streaming=True, ansi=True)
    plan = plan_deduplication(definition, None, None)
    with Harness(
        plan.operator, input=schema, output=plan.output, keys=["user"], options=Options(sample_batches=2), parallelism=1
    ) as query:
        query.push([("ann", 1)])
        assert not sample_objects(query)
        with pytest.raises(ConfigurationError, match="no processor of yours"):
            statelog.replay(parts_of(query).query.location, 0, "ann", Commands(), rows=pa.table({"user": ["ann"]}))


# ---- Options and format ----


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"sample_batches": -1}, "sample_batches is -1"),
        ({"sample_batches": 9}, "sample_batches is 9 beside retained_checkpoints 10.*Retain 11 or more"),
        ({"sample_max_bytes": 0}, "sample_max_bytes is 0"),
    ],
)
def test_values_of_the_options(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        Options(**values)
    Options(sample_batches=8)


def make_sample(rows: int, initial: int | None, version: int = 1) -> Sample:
    table = pa.table({"user": ["ann"] * rows, "n": list(range(rows))})
    more = None if initial is None else pa.table({"user": ["bob"] * initial})
    operator = SampledOperator(
        **{name: getattr(OPERATOR, name) for name in OPERATOR.__struct_fields__} | {"initial_columns": ["user"]}
    )
    return Sample(SampleHeader(3, operator, initial is not None, 0, version), table, more)


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
@pytest.mark.parametrize(("rows", "initial"), [(0, None), (3, None), (3, 2), (0, 2), (3, 0)])
def test_a_sample_is_read_as_it_was_written(codec: str | None, rows: int, initial: int | None) -> None:
    sample = make_sample(rows, initial)
    assert decode_sample(encode_sample(sample, codec), "name") == sample


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_samples_are_compressed(codec: str) -> None:
    sample = make_sample(10_000, None)
    assert 4 * len(encode_sample(sample, codec)) < 3 * len(encode_sample(sample, None))


@pytest.mark.parametrize("size_bytes", [0, 7])
def test_a_part_of_a_checksum_is_no_sample(size_bytes: int) -> None:
    with pytest.raises(CorruptionError, match=f"op/name: the {size_bytes} bytes"):
        decode_sample(SAMPLE[-size_bytes:] if size_bytes else b"", "op/name")


SAMPLE = encode_sample(make_sample(3, 2), "lz4")


@settings(max_examples=200)
@given(st.integers(0, len(SAMPLE) - 1), st.integers(1, 255), st.booleans())
def test_a_damaged_sample_is_refused(place: int, change: int, is_cut: bool) -> None:
    damaged = SAMPLE[:place] + (b"" if is_cut else bytes([SAMPLE[place] ^ change]) + SAMPLE[place + 1 :])
    with pytest.raises(CorruptionError, match="op/name: the .* bytes of the sample are not those that were written"):
        decode_sample(damaged, "op/name")


def test_a_sample_of_a_later_version_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="version 2, and this statelog reads up to 1"):
        decode_sample(encode_sample(make_sample(1, None, version=2), None), "name")


def test_a_damaged_sample_is_named() -> None:
    with Sampled(parallelism=1) as query:
        query.run(ROWS)
        [name] = sample_objects(query)
        path = Path(query.location, name)
        data = bytearray(path.read_bytes())
        data[50] ^= 1
        os.chmod(path, 0o600)
        path.write_bytes(data)
        with pytest.raises(CorruptionError, match=name):
            statelog.replay(query.location, 0, "ann", Commands())
