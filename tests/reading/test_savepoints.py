"""A savepoint is read as the checkpoint that it was taken from; only the functions that read one batch take it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import ArrayType, IntegerType, StructField, StructType

import statelog
from statelog import ConfigurationError, CorruptionError, ErrorKind, StateMissingError, StorageError
from statelog.coordinator.batch import BatchTime
from statelog.reading.savepoint import Manifest, SavedFile, SavedOperator
from statelog.runs import digests
from statelog.storage import LocalStore
from statelog.testing import Harness
from statelog.testing.harness import parts_of
from tests.compat.fixtures_support import expected
from tests.compat.savepoints_support import BATCH, FIXTURES, WORDS
from tests.model.engine import Model
from tests.reading.kinds_of_state_support import Reminders, Sums, Visits, visits
from tests.reading.saved import save
from tests.reading.savepoints_support import same
from tests.reading.story import KEYS, STATES, Story, hash_of, rows
from tests.stored_query import StoredQuery

AT = 9
START_MS = 1_780_000_000_000


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    story = Story(tmp_path_factory.mktemp("story"), parallelism=5)
    story.engine.times |= {batch: BatchTime(START_MS + 1000 * batch, 0) for batch in story.engine.times}
    story.run_batches(12, random.Random(1))
    return story


@pytest.fixture(scope="module")
def whole(story: Story, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A savepoint of some parts, whose files have some row groups; nobody changes it."""
    target = tmp_path_factory.mktemp("savepoints") / "saved"
    manifest = save(story.location, target, AT, part_bytes=4000, slice_bytes=400)
    files = [file for state in manifest.operators[0].states for file in state.files]
    assert manifest.operators[0].parts > 2
    assert max(pq.ParquetFile(target / file.name).num_row_groups for file in files) > 2
    return target


@pytest.fixture
def saved(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "saved")


# ---- Rows, of every kind of state ----


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
@pytest.mark.parametrize("state", STATES)
def test_every_state_has_the_rows_and_columns_of_the_checkpoint(
    story: Story, whole: Path, state: str, memory_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statelog.reading.savepoint.MEMORY_BYTES", memory_bytes)
    assert rows(same(story.location, whole, uid="op", state=state, at=AT)) == STATES[state](story.models[AT])
    assert rows(statelog.read_state(whole, state=state).read_all()) == STATES[state](story.models[AT])
    same(story.location, whole, state=state, at=AT, columns=["value_field", "hash"])
    same(story.location, whole, state=state, at=AT, columns=["value_field", "key_b", "value_field"])
    assert same(story.location, whole, state=state, at=AT, columns=[]).num_rows > 0


def test_values_expire_by_the_time_of_the_checkpoint(tmp_path: Path) -> None:
    with visits(Visits()) as harness:
        harness.push([("a", 1), ("b", 2)], processingTimeMs=10)
        harness.push([("b", 3)], processingTimeMs=60)
        harness.push([], processingTimeMs=120)
        location = parts_of(harness).query.location
        for batch, left in ((1, 2), (2, 1)):
            target = tmp_path / str(batch)
            save(location, target, batch)
            assert same(location, target, state="timers", at=batch).num_rows == left
            assert same(location, target, state="timers", at=batch, keys=["b"]).column_names[-1] == "expires_ms"


def test_a_deleted_state_is_gone(tmp_path: Path) -> None:
    with visits(Visits()) as harness:
        location = parts_of(harness).query.location
        harness.push([("a", 1)], processingTimeMs=10)
        harness.restart(processor=Visits("old"))
        harness.push([("a", 2)], processingTimeMs=20)
        save(location, tmp_path / "without", 1)
        with pytest.raises(ConfigurationError, match="no state 'old'"):
            statelog.read_state(tmp_path / "without", state="old")
        harness.restart(processor=Visits())
        harness.push([("b", 3)], processingTimeMs=30)
        save(location, tmp_path / "again", 2)
        assert same(location, tmp_path / "again", state="old").to_pylist() == [{"key_k": "b", "value_n": 3}]
        assert same(location, tmp_path / "again", state="old", keys=["a", "b"]).num_rows == 1


def test_timers_are_read(tmp_path: Path) -> None:
    with visits(Reminders()) as harness:
        harness.push([("a", 1), ("b", 2)], processingTimeMs=10)
        harness.push([("b", 3)], processingTimeMs=60)
        location = parts_of(harness).query.location
        save(location, tmp_path / "saved", 1)
        assert same(location, tmp_path / "saved", state="timers").num_rows == 3
        found = same(location, tmp_path / "saved", state="timers", keys=["b"])
        assert found.to_pylist() == [{"key_k": "b", "time_ms": at} for at in (1010, 1060)]


def test_operator_state_is_read_by_subtask(tmp_path: Path) -> None:
    with Harness(Sums(), input="n long", broadcast="name string, n long", output="n long", parallelism=2) as harness:
        harness.push([(1,), (2,), (4,)], broadcast=[("a", 5), ("b", 6)])
        location = parts_of(harness).query.location
        save(location, tmp_path / "saved", 0)
        assert same(location, tmp_path / "saved", state="sums")["subtask"].to_pylist() == [0, 1]
        assert same(location, tmp_path / "saved", state="rules").num_rows == 2
        same(location, tmp_path / "saved", state="rules", columns=["value_n", "subtask"])
        with pytest.raises(ConfigurationError, match="has no keys: its state is kept by subtask"):
            statelog.read_state(tmp_path / "saved", state="sums", keys=[1])


ALIKE = ["a", "a.b", "b"]
"""Names of fields; Parquet has dots between the parts of a nested column."""


class Types:
    """Keeps a value of types that Parquet does not have, or has with nulls only."""

    def init(self, handle: Any) -> None:
        numbers = StructField("numbers", ArrayType(IntegerType(), containsNull=False))
        schema = StructType([numbers, StructField("nested", StructType([numbers]))])
        self._numbers = handle.getValueState("numbers", schema)
        self._alike = handle.getValueState("alike", StructType([StructField(name, IntegerType()) for name in ALIKE]))
        self._others = handle.getMapState(
            "others", "t time(6), d decimal(20,3)", "t time(6), i interval day to second, v void, m map<string,date>"
        )

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        self._numbers.update(([1, 2], ([3],)))
        self._alike.update((1, 2, 3))
        self._others.updateValue((None, None), (None, None, None, None))
        yield from ()

    def close(self) -> None:
        pass


def test_types_are_those_of_the_state(tmp_path: Path) -> None:
    with Harness(Types(), input="k date", keys=["k"], output="n long") as harness:
        harness.push([(None,)])
        location = parts_of(harness).query.location
        save(location, tmp_path / "saved", 0)
        numbers = same(location, tmp_path / "saved", state="numbers", keys=[None])
        assert numbers.schema.field("value_numbers").type == pa.list_(pa.field("element", pa.int32(), nullable=False))
        for name in ALIKE:
            assert same(location, tmp_path / "saved", state="alike", columns=[f"value_{name}"]).num_rows == 1
        assert same(location, tmp_path / "saved", state="others").schema.field("value_t").type == pa.time64("ns")


def test_empty_states_have_their_columns(tmp_path: Path) -> None:
    story = Story(tmp_path / "query")
    story.run(0, [(KEYS[0], ("unset",))])
    save(story.location, tmp_path / "saved", 0)
    for state in STATES:
        assert same(story.location, tmp_path / "saved", state=state).num_rows == 0
        assert same(story.location, tmp_path / "saved", state=state, keys=[KEYS[0]]).num_rows == 0


@pytest.mark.parametrize("fixture", sorted(FIXTURES.iterdir()), ids=lambda path: path.name)
def test_savepoints_of_every_version_are_read(fixture: Path) -> None:
    for state, rows_of in STATES.items():
        assert rows(statelog.read_state(fixture, "op", state, at=BATCH).read_all()) == rows_of(expected())
    words = statelog.read_state(fixture, "words", "words").read_all()
    assert sorted(words["value_word"].to_pylist()) == WORDS


def test_a_large_file_is_read_a_few_bytes_at_a_time(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statelog.reading.savepoint.MEMORY_BYTES", 0)
    lengths: list[int | None] = []
    read = LocalStore.read

    def noted_read(self: LocalStore, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if name.endswith(".parquet"):
            lengths.append(length)
        return read(self, name, offset=offset, length=length)

    monkeypatch.setattr(LocalStore, "read", noted_read)
    assert statelog.read_state(whole, state="list").read_all().num_rows > 0
    assert lengths
    assert None not in lengths


# ---- Some keys ----


@pytest.mark.parametrize("state", STATES)
def test_some_keys_are_found_without_the_others(story: Story, whole: Path, state: str) -> None:
    wanted = [KEYS[3], KEYS[4], KEYS[20], KEYS[20], KEYS[-1], (1000, "none")]
    model = Model({key: found for key, found in story.models[AT].keys.items() if key in wanted})
    assert rows(same(story.location, whole, state=state, at=AT, keys=wanted)) == STATES[state](model)
    same(story.location, whole, state=state, at=AT, keys=wanted, columns=["value_field"])
    assert same(story.location, whole, state=state, at=AT, keys=[]).num_rows == 0
    for key in KEYS:
        same(story.location, whole, state=state, at=AT, keys=[key])


def test_keys_with_one_hash_are_told_apart(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path / "query").run(["op"], range(2))  # all its keys have the hash 0
    statelog.savepoint(query.checkpoint, tmp_path / "saved")
    [state] = [one for one in read_manifest(tmp_path / "saved").operators[0].states if one.schema.name == "value"]
    path = tmp_path / "saved" / state.files[0].name
    one = pq.read_table(path)
    other = one.set_column(1, one.schema.field(1), pa.array([2], one.schema.field(1).type))
    own_hash = [pa.array([hash_of((1, None))], pa.uint64()).view(pa.int64())]
    both = pa.concat_tables([one.set_column(0, one.schema.field(0), own_hash) for one in (one, other)])
    replaced(tmp_path / "saved", state.files[0], lambda path: pq.write_table(both, path))
    found = statelog.read_state(tmp_path / "saved", state="value", keys=[(1, None)], columns=["key_a"]).read_all()
    assert found.to_pylist() == [{"key_a": 1}]


def test_a_look_up_reads_the_files_and_row_groups_with_its_hash(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[str] = []
    groups: list[int] = []
    read, batches = LocalStore.read, pq.ParquetFile.iter_batches

    def noted_read(self: LocalStore, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        files.append(name)
        return read(self, name, offset=offset, length=length)

    def noted_batches(self: pq.ParquetFile, *arguments: Any, row_groups: list[int], **others: Any) -> Any:
        groups.extend(row_groups)
        return batches(self, *arguments, row_groups=row_groups, **others)

    monkeypatch.setattr(LocalStore, "read", noted_read)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noted_batches)
    assert statelog.read_state(whole, state="list", keys=[KEYS[3]]).read_all().num_rows > 0
    [name] = [name for name in files if name.endswith(".parquet")]
    assert 0 < len(groups) < pq.ParquetFile(whole / name).num_row_groups


@pytest.mark.parametrize("keys", [[3], [("text", "a")], pa.table({"a": [3]}), [(3, 2 << 70)]])
def test_keys_that_do_not_fit_are_refused(whole: Path, keys: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"has the key \(a int64, b string\)"):
        statelog.read_state(whole, state="map", keys=keys)


# ---- The batch and the operator ----


@pytest.mark.parametrize(
    "at", [None, AT, datetime.fromtimestamp(START_MS / 1000 + AT, UTC), datetime(2100, 1, 1, tzinfo=UTC)]
)
def test_the_batch_of_the_savepoint_is_read(whole: Path, at: Any) -> None:
    assert statelog.read_state(whole, state="value", at=at).read_all().num_rows > 0
    assert len(statelog.list_states(whole, at=at)) == 3


@pytest.mark.parametrize("at", [AT - 1, AT + 1, -1, datetime.fromtimestamp(START_MS / 1000 + AT - 0.001, UTC)])
def test_another_batch_is_refused(whole: Path, at: Any) -> None:
    with pytest.raises(StateMissingError, match=rf"has the state of batch {AT} at 2026-.*\+00:00, not of ") as one:
        statelog.read_state(whole, state="value", at=at)
    assert one.value.hint
    with pytest.raises(StateMissingError):
        statelog.list_states(whole, at=at)


def test_a_time_without_a_zone_is_refused(whole: Path) -> None:
    with pytest.raises(ConfigurationError, match="no time zone"):
        statelog.read_state(whole, state="value", at=datetime(2026, 5, 1))


def test_operators_are_chosen_and_listed(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run(["b", "a"], range(3))
    statelog.savepoint(query.checkpoint, tmp_path / "saved")
    same(query.checkpoint, tmp_path / "saved", uid="b", state="list")
    same(Path(query.location), tmp_path / "saved", uid="a", state="list")
    with pytest.raises(ConfigurationError, match="saved has several operators: 'a', 'b'"):
        statelog.read_state(tmp_path / "saved", state="value")
    with pytest.raises(ConfigurationError, match="saved has no operator 'c'; it has 'a', 'b'"):
        statelog.read_state(tmp_path / "saved", "c", state="value")
    assert statelog.list_states(tmp_path / "saved", "b") == statelog.list_states(query.checkpoint, "b")
    own, listed = statelog.list_operators(tmp_path / "saved")
    _, known = statelog.list_operators(query.checkpoint)
    assert (own.uid, own.location) == ("a", str(tmp_path / "saved"))
    assert (listed.uid, listed.query_id, listed.key, listed.states, listed.batch, listed.batch_time_ms) == (
        known.uid, known.query_id, known.key, known.states, known.batch, known.batch_time_ms
    )  # fmt: skip
    tables = (tmp_path / "saved" / "operators" / "b").rglob("*.parquet")
    assert listed.state_bytes == sum(path.stat().st_size for path in tables)
    assert listed.parallelism == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"uid": "op", "state": "other"}, "in the savepoint .* has no state 'other'"),
        ({}, "has the states 'list', 'map', 'value'"),
        ({"state": "value", "columns": ["value"]}, "has no column 'value'"),
    ],
)
def test_mistakes_are_named(whole: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as one:
        statelog.read_state(whole, **arguments)
    assert one.value.hint


REFUSING: list[Callable[[Path], Any]] = [
    lambda path: statelog.read_changes(path, state="value"),
    lambda path: statelog.read_history(path, KEYS[0], state="value"),
    lambda path: statelog.read_diff(path, AT, AT, state="value"),
    lambda path: statelog.open_state(path),
    lambda path: statelog.open_state(path, "op", at=AT),
    lambda path: statelog.compare(path, path),
    lambda path: statelog.verify(path),
    lambda path: statelog.list_checkpoints(path),
    lambda path: statelog.pin(path, lasts_s=None, owner="audit"),
    lambda path: statelog.list_pins(path),
]


@pytest.mark.parametrize("call", REFUSING)
def test_what_needs_a_log_refuses_a_savepoint(whole: Path, call: Callable[[Path], Any]) -> None:
    with pytest.raises(ConfigurationError, match="saved is a savepoint") as one:
        call(whole)
    assert "read_state, list_operators and list_states" in one.value.hint


def test_a_file_named_as_the_manifest_does_not_hide_state(tmp_path: Path) -> None:
    query = StoredQuery(tmp_path).run(["op"], range(3))
    for folder in (query.checkpoint, query.checkpoint / "statelog"):
        (folder / "manifest.json").write_text("{}")
        assert statelog.read_state(folder, state="value").read_all()["value_field"].to_pylist() == [2]


# ---- Damage ----


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
@pytest.mark.parametrize("keys", [None, KEYS])
def test_damaged_files_are_not_read(saved: Path, keys: Any, memory_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("statelog.reading.savepoint.MEMORY_BYTES", memory_bytes)
    file = first_file(saved)
    path = saved / file.name
    written = path.read_bytes()
    middle = len(written) // 3
    changed = written[:middle] + bytes([written[middle] ^ 1]) + written[middle + 1 :]
    for data in (changed, written[:-1], written + b"x", b""):
        path.write_bytes(data)
        with pytest.raises(CorruptionError, match=rf"{file.name}: its {len(data)} bytes are not those") as one:
            statelog.read_state(saved, state="value", keys=keys).read_all()
        assert one.value.kind is ErrorKind.CHECKSUM
    path.unlink()
    with pytest.raises(CorruptionError, match=rf"{file.name}: the file is gone") as one:
        statelog.read_state(saved, state="value", keys=keys).read_all()
    assert one.value.kind is ErrorKind.OBJECT_MISSING


def test_a_store_that_fails_is_no_damage(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = LocalStore.read

    def failing_read(self: LocalStore, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if name.endswith(".parquet"):
            raise StorageError("no answer", kind=ErrorKind.STORE_BUSY, hint="Try again.")
        return read(self, name, offset=offset, length=length)

    monkeypatch.setattr(LocalStore, "read", failing_read)
    reader = statelog.read_state(whole, state="list")
    with pytest.raises(StorageError, match="no answer"):
        reader.read_all()


def test_a_damaged_manifest_is_refused(saved: Path) -> None:
    path = saved / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"batch": 9', b'"batch": 8'))
    for call in (statelog.read_state, statelog.list_operators, statelog.list_states):
        with pytest.raises(CorruptionError, match=r"saved/manifest\.json"):
            call(saved)


def test_tables_of_other_programs_are_refused_or_read(saved: Path) -> None:
    file = first_file(saved)
    table = pq.read_table(saved / file.name)
    file = replaced(saved, file, lambda path: pq.write_table(table, path, write_statistics=False))
    key = tuple(table.slice(0, 1).select(["key_a", "key_b"]).to_pylist()[0].values())
    assert statelog.read_state(saved, state="value", keys=[key]).read_all().num_rows == 1
    file = replaced(saved, file, lambda path: pq.write_table(table.drop_columns(["key_b"]), path))
    with pytest.raises(CorruptionError, match="its columns are hash, key_a, value_field, not hash, key_a, key_b"):
        statelog.read_state(saved, state="value").read_all()
    replaced(saved, file, lambda path: path.write_bytes(b"text"))
    with pytest.raises(CorruptionError, match="cannot be read as Parquet"):
        statelog.read_state(saved, state="value").read_all()


def read_manifest(savepoint: Path) -> Manifest:
    return Manifest.read(LocalStore(str(savepoint)), str(savepoint))


def first_file(savepoint: Path) -> SavedFile:
    """A file of the state ``value`` with rows."""
    [operator] = read_manifest(savepoint).operators
    [files] = [state.files for state in operator.states if state.schema.name == "value"]
    return next(file for file in files if file.rows)


def replaced(savepoint: Path, file: SavedFile, write: Callable[[Path], Any]) -> SavedFile:
    """A file that was written anew, as the manifest says from now on."""
    write(savepoint / file.name)
    data = (savepoint / file.name).read_bytes()
    new = msgspec.structs.replace(file, length=len(data), checksum=digests.checksum(data))

    def with_new(operator: SavedOperator) -> SavedOperator:
        states = [
            msgspec.structs.replace(state, files=[new if one == file else one for one in state.files])
            for state in operator.states
        ]
        return msgspec.structs.replace(operator, states=states)

    manifest = read_manifest(savepoint)
    operators = [with_new(operator) for operator in manifest.operators]
    (savepoint / "manifest.json").unlink()
    msgspec.structs.replace(manifest, operators=operators).write(LocalStore(str(savepoint)))
    return new
