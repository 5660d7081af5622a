"""Reading stored runs: what is fetched of them, and what is noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from statelog import CorruptionError, ErrorKind, StatelogError, StorageError
from statelog.local.stored_reader import TAIL_BYTES, RunMemory, StoredBytes, read_run, read_threads
from statelog.log.references import StoredRun
from statelog.runs import digests
from statelog.runs.key_groups import HashRange
from statelog.runs.merge import clip_run
from statelog.runs.reader import Run
from statelog.runs.schema import MAGIC, Operation, StateSchema, change_schema
from statelog.runs.writer import StateChanges, encode_run
from statelog.storage import LocalStore
from statelog.testing.faults import Call, Fault, FaultPlan, FaultStore
from tests.contract.table_contract import MAP, VALUE, encode_changes

ROWS = 60_000
LAST = (1 << 64) - 1


def large_run() -> bytes:
    """Two states with random values, in blocks of 1,000 rows."""
    random = np.random.default_rng(1)
    sections = []
    for state in (VALUE, MAP):
        hashes = np.sort(random.integers(0, 1 << 63, ROWS, dtype=np.uint64) * np.uint64(2))
        schema = change_schema(state)
        texts = pa.array([bytes(text) for text in random.integers(0, 256, (ROWS, 16), dtype=np.uint8)], pa.binary())
        columns = {
            "hash": pa.array(hashes),
            "key": texts,
            "entry": texts if state is MAP else pa.array([b""] * ROWS, pa.binary()),
            "op": pa.array(np.zeros(ROWS, np.uint8)),
            "expiry": pa.nulls(ROWS, pa.int64()),
        }
        arrays = [columns.get(field.name) for field in schema]
        filled = [
            pa.nulls(ROWS, field.type) if array is None else array for field, array in zip(schema, arrays, strict=True)
        ]
        sections.append(StateChanges(state, [pa.RecordBatch.from_arrays(filled, schema=schema)]))
    return encode_run(sections, compression="lz4", block_rows=1000)


DATA = large_run()


class Sizes(FaultPlan):
    """Notes the reads."""

    def __init__(self) -> None:
        self.reads = 0

    def fault(self, call: Call) -> Fault | None:
        self.reads += call.operation == "read"
        return None


class Counting(LocalStore):
    """Counts the bytes read."""

    read_bytes = 0

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: list[tuple[int, int]] = []

    def read(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        data = super().read(name, offset=offset, length=length)
        self.read_bytes += len(data)
        self.requests.append((offset, offset + len(data)))
        return data

    def read_into(self, buffer: memoryview, name: str, *, offset: int = 0) -> int:
        length = super().read_into(buffer, name, offset=offset)
        self.read_bytes += length
        self.requests.append((offset, offset + length))
        return length


def put(store: LocalStore, data: bytes) -> StoredRun:
    """A run in the middle of an object."""
    store.put("object", bytes(100) + data + bytes(50))
    return StoredRun("object", 100, len(DATA), digests.checksum(DATA), 2 * ROWS, 0, LAST)


def rows(run: Run) -> dict[str, list[dict[str, object]]]:
    return {
        name: [row for block in section.blocks for row in block.load().to_pylist()]
        for name, section in run.sections.items()
    }


@pytest.mark.parametrize(
    "within",
    [(0, LAST), (0, 0), (LAST // 3, LAST // 2), (LAST - 1, LAST), (LAST - LAST // 1000, LAST), (17, LAST // 50)],
)
def test_a_part_holds_what_is_wanted(tmp_path: Path, within: tuple[int, int]) -> None:
    part = HashRange(*within)
    store = Counting(tmp_path)
    stored = put(store, DATA)
    found = read_run(store, stored, "a run", part)
    expected = clip_run(Run(pa.py_buffer(DATA), "whole"), part)
    assert rows(clip_run(found, part)) == rows(expected)
    share = (within[1] - within[0] + 1) / (1 << 64)
    assert 0 < store.read_bytes <= share * len(DATA) + 600_000


def test_blocks_that_follow_each_other_are_read_with_one_request(tmp_path: Path) -> None:
    """The wanted blocks of the two states are far apart, and neither are the first of the object."""
    store = Counting(tmp_path)
    stored = put(store, DATA)
    read_run(store, stored, "a run", HashRange(LAST // 3, LAST // 3 + LAST // 8))
    ends = store.requests[:2]
    assert [end - start for start, end in ends] == [len(MAGIC), 64 << 10]
    assert len(store.requests) == len(ends) + 2
    for start, end in store.requests[2:]:
        assert end - start > 200_000


@pytest.mark.parametrize("within", [None, HashRange(0, LAST)])
@pytest.mark.parametrize("kind", [ErrorKind.OBJECT_MISSING, ErrorKind.STORE_BUSY])
def test_a_missing_object_is_damage_and_a_store_that_does_not_answer_is_not(
    tmp_path: Path, kind: ErrorKind, within: HashRange | None
) -> None:
    class Failing(LocalStore):
        def read_into(self, buffer: memoryview, name: str, *, offset: int = 0) -> int:
            raise StorageError("no answer.", kind=kind)

    store = Failing(tmp_path)
    with pytest.raises(StatelogError, match="no answer") as failure:
        read_run(store, put(store, DATA), "the base of subtask 3", within)
    assert failure.value.kind is kind
    is_missing = kind is ErrorKind.OBJECT_MISSING
    assert isinstance(failure.value, CorruptionError) == is_missing
    assert ("It holds the base of subtask 3 at offset 100." in failure.value.message) == is_missing


def test_memory_is_used_again(tmp_path: Path) -> None:
    """For another part, for the whole, and for other bytes of the same length; whatever it holds from before."""
    store = LocalStore(tmp_path)
    stored = put(store, DATA)
    memory = RunMemory()
    for within in (HashRange(LAST // 3, LAST // 2), None, HashRange(0, LAST // 9), None):
        run = read_run(store, stored, "a run", within, memory)
        part = within or HashRange(0, LAST)
        assert rows(clip_run(run, part)) == rows(clip_run(Run(pa.py_buffer(DATA), "whole"), part))
    store.put("object", bytes(150 + len(DATA)))
    for within in (HashRange(0, LAST // 9), None):
        with pytest.raises(CorruptionError, match="object"):
            read_run(store, stored, "a run", within, memory)


@pytest.mark.parametrize("within", [None, HashRange(0, LAST)])
def test_a_run_that_was_cut_is_an_error_whatever_the_memory_holds(tmp_path: Path, within: HashRange | None) -> None:
    """The missing bytes may be there from before."""
    store = LocalStore(tmp_path)
    stored = put(store, DATA)
    memory = RunMemory()
    read_run(store, stored, "a run", None, memory)
    store.put("object", bytes(100) + DATA[:-1])
    with pytest.raises(CorruptionError, match="object"):
        read_run(store, stored, "a run", within, memory)


@pytest.mark.parametrize("within", [None, HashRange(0, LAST), HashRange(LAST // 2, LAST), HashRange(0, 0)])
def test_a_footer_may_be_long(tmp_path: Path, within: HashRange | None) -> None:
    """A run of many blocks: what is read first is only the end of its footer."""
    count = 3000
    changes = [(number * (LAST // count), b"k", b"", Operation.PUT, "text") for number in range(count)]
    data = encode_changes(VALUE, changes, block_rows=1)
    store = LocalStore(tmp_path)
    store.put("object", bytes(100) + data)
    stored = StoredRun("object", 100, len(data), digests.checksum(data), count, 0, LAST)
    memory = RunMemory()
    memory.of(len(data))[:] = bytes(len(data))
    part = within or HashRange(0, LAST)
    run = read_run(store, stored, "a run", within, memory)
    assert rows(clip_run(run, part)) == rows(clip_run(Run(pa.py_buffer(data), "whole"), part))


def test_a_small_run_in_the_middle_of_an_object(tmp_path: Path) -> None:
    data = encode_changes(VALUE, [(1, b"k", b"", Operation.PUT, "text")])
    store = LocalStore(tmp_path)
    store.put("object", bytes(100) + data + bytes(50))
    stored = StoredRun("object", 100, len(data), digests.checksum(data), 1, 0, LAST)
    assert rows(read_run(store, stored, "a run")) == rows(Run(pa.py_buffer(data), "whole"))
    store.put("object", bytes(100) + data[:-1])
    with pytest.raises(CorruptionError, match="object: a run at offset 100"):
        read_run(store, stored, "a run")


def test_a_small_run_is_read_at_once(tmp_path: Path) -> None:
    plan = Sizes()
    data = encode_run([], compression=None, block_rows=10)
    store = FaultStore(LocalStore(tmp_path), plan)
    store.put("small", data)
    read_run(store, StoredRun("small", 0, len(data), digests.checksum(data), 0, 0, LAST), "a run", HashRange(0, 5))
    assert plan.reads == 1


@pytest.mark.parametrize("within", [HashRange(0, LAST), HashRange(LAST // 3, LAST // 2)])
def test_damage_in_what_is_read_is_an_error(tmp_path: Path, within: HashRange) -> None:
    """And nothing else: whatever byte is flipped, the rows are right or an error names the object."""
    store = LocalStore(tmp_path)
    expected = rows(clip_run(Run(pa.py_buffer(DATA), "whole"), within))
    damaged = 0
    for place in range(3, len(DATA), len(DATA) // 60):
        data = bytearray(DATA)
        data[place] ^= 16
        stored = put(store, bytes(data))
        try:
            assert rows(clip_run(read_run(store, stored, "a run", within), within)) == expected
        except CorruptionError as error:
            assert "object" in error.message
            damaged += 1
    assert damaged > 5


def test_a_part_that_is_cut_short_is_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    stored = put(store, DATA)
    store.put("object", store.read("object")[: -(len(DATA) // 2)])
    with pytest.raises(CorruptionError, match="object"):
        read_run(store, stored, "a run", HashRange(0, LAST // 2))


@pytest.mark.parametrize("state", [VALUE, MAP])
@pytest.mark.parametrize("within", [None, HashRange(LAST // 3, LAST // 2)])
def test_one_state_of_a_run(tmp_path: Path, state: StateSchema, within: HashRange | None) -> None:
    store = Counting(tmp_path)
    stored = put(store, DATA)
    found = read_run(store, stored, "a run", within, states=[state.name])
    part = within or HashRange(0, LAST)
    whole = rows(clip_run(Run(pa.py_buffer(DATA), "whole"), part))
    assert rows(clip_run(found, part)) == {state.name: whole[state.name]}
    assert store.read_bytes < 0.7 * len(DATA) / (1 if within is None else 3)


def test_a_directory_is_read_by_one_thread_and_an_object_store_by_several(tmp_path: Path) -> None:
    class ObjectStore(LocalStore):
        can_append = False

    assert read_threads(LocalStore(tmp_path)) == 1
    assert read_threads(ObjectStore(tmp_path)) > 1


# ---- Parts of a run as they are needed ----


def test_of_a_large_run_its_end_is_read_first_and_then_only_the_slices_before(tmp_path: Path) -> None:
    store = Counting(tmp_path)
    size = len(DATA)
    data = StoredBytes(store, put(store, DATA), "a run", size - 1)
    tail_at = size - TAIL_BYTES
    assert store.requests == [(100 + tail_at, 100 + size)]
    assert data.size == size
    for offset, length in ((tail_at, 10), (tail_at, TAIL_BYTES), (size - 5, 5), (size, 0)):
        assert data.slice(offset, length) == DATA[offset : offset + length]
    assert data.slice(tail_at + 1) == DATA[tail_at + 1 :]
    assert len(store.requests) == 1
    for offset, length in ((0, 10), (tail_at - 1, 1), (tail_at - 1, 2), (20, size - 20)):
        assert data.slice(offset, length) == DATA[offset : offset + length]
        assert store.requests[-1] == (100 + offset, 100 + offset + length)
    assert data.slice() == DATA
    assert data.slice(tail_at - 1) == DATA[tail_at - 1 :]
    assert len(store.requests) == 7


def test_a_small_run_is_read_and_checked_at_once(tmp_path: Path) -> None:
    store = Counting(tmp_path)
    size = len(DATA)
    stored = put(store, DATA)
    data = StoredBytes(store, stored, "a run", size)
    assert store.requests == [(100, 100 + size)]
    assert [data.slice(), data.slice(0, 3), data.slice(9), data.slice(9, 5)] == [DATA, DATA[:3], DATA[9:], DATA[9:14]]
    assert len(store.requests) == 1
    put(store, DATA[:200] + b"!" + DATA[201:])
    with pytest.raises(CorruptionError, match="object: a run at offset 100"):
        StoredBytes(store, stored, "a run", size)
    StoredBytes(store, stored, "a run", size - 1)


def test_a_slice_that_is_cut_short_or_gone_is_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    stored = put(store, DATA)
    data = StoredBytes(store, stored, "a run", TAIL_BYTES)
    store.put("object", bytes(100) + DATA[:1000])
    assert data.slice(990, 10) == DATA[990:1000]
    with pytest.raises(CorruptionError, match="object: a run at offset 100, .* is damaged or truncated"):
        data.slice(990, 11)
    with pytest.raises(CorruptionError, match="object: a run at offset 100"):
        StoredBytes(store, stored, "a run", TAIL_BYTES)
    store.delete(["object"])
    with pytest.raises(CorruptionError, match="It holds a run at offset 100") as caught:
        data.slice(0, 3)
    assert caught.value.kind is ErrorKind.OBJECT_MISSING
