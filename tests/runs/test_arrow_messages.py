"""Record batches from a store: no memory is taken for what a message says of itself, and no value is outside of it."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from statelog.errors import CorruptionError
from statelog.local.stored_reader import RunMemory, read_run
from statelog.log.references import StoredRun
from statelog.runs.arrow_messages import MalformedMessage, read_batch, read_stream, require_plain, stream_batches
from statelog.runs.schema import StateDescriptor, StateSchema, decode_schema
from statelog.testing.query import ManualClock
from tests.stores import MemoryStore

Numbers = npt.NDArray[np.int32]
Change = Callable[[Numbers], None]

BATCH = pa.record_batch(
    {
        "n": pa.array(range(300), pa.int64()),
        "text": ["é" * (number % 7) for number in range(300)],
        "bytes": [b"x" * (number % 5) for number in range(300)],
        "list": pa.array([[number] * (number % 3) for number in range(300)], pa.list_(pa.int32())),
        "map": pa.array([[("k", {"d": [b"z"]})] for _ in range(300)],
                        pa.map_(pa.string(), pa.struct([("d", pa.list_(pa.binary()))]))),
        "flag": [None if number % 3 else True for number in range(300)],
        "large": pa.array(["a"] * 300, pa.large_string()),
    }
)  # fmt: skip


def message_of(compression: str | None, batch: pa.RecordBatch = BATCH) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes()[batch.schema.serialize().size : -8])


def read(data: bytes, size_bytes: int | None, batch: pa.RecordBatch = BATCH) -> pa.RecordBatch:
    return read_batch(pa.py_buffer(data), batch.schema, batch.num_rows, size_bytes)


@pytest.mark.parametrize("compression", ["lz4", "zstd", None])
@pytest.mark.parametrize("batch", [BATCH, BATCH.slice(7, 100), BATCH.slice(0, 1)])
def test_what_was_written_is_read(batch: pa.RecordBatch, compression: str | None) -> None:
    assert read(message_of(compression, batch), batch.nbytes, batch) == batch
    if compression is None:
        assert read(message_of(None, batch), None, batch) == batch


def declared_at(data: bytes, body: bytes) -> int:
    """Where a compressed buffer declares its size: in front of the frame that begins with some bytes."""
    return data.index(body) - 8


@pytest.mark.parametrize(("compression", "magic"), [("lz4", b"\x04\x22\x4d\x18"), ("zstd", b"\x28\xb5\x2f\xfd")])
@pytest.mark.parametrize("declared", [1 << 32, (1 << 32) - 1, 1 << 62, -2, -(1 << 63), 1 << 31])
def test_a_buffer_that_declares_more_than_it_has_takes_no_memory(compression: str, magic: bytes, declared: int) -> None:
    data = bytearray(message_of(compression))
    struct.pack_into("<q", data, declared_at(bytes(data), magic), declared)
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)  # its maximum is not that of earlier tests
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(MalformedMessage, match=r"decompressed|negative|Invalid"):
            read(bytes(data), BATCH.nbytes)
    finally:
        pa.set_memory_pool(default)
    assert pool.max_memory() < 64 << 20


@pytest.mark.parametrize("size_bytes", [1 << 40, 4])
def test_a_compressed_buffer_ends_within_the_message(size_bytes: int) -> None:
    """Its size limits how much it may become."""
    batch = pa.record_batch({"n": pa.array(range(1000), pa.int64())})
    data = message_of("lz4", batch)
    pairs = (struct.pack("<qq", 0, length) for length in range(9, len(data)))
    pair = next(pair for pair in pairs if pair in data)
    with pytest.raises(MalformedMessage, match="a buffer reaches beyond the message"):
        read(data.replace(pair, struct.pack("<qq", 0, size_bytes), 1), batch.nbytes, batch)


def test_a_block_that_is_larger_than_its_footer_says_takes_no_memory() -> None:
    zeros = pa.record_batch({"n": pa.array(np.zeros(1 << 20, np.int64))})
    data = message_of("zstd", zeros)
    assert read(data, zeros.nbytes, zeros) == zeros
    with pytest.raises(MalformedMessage, match="8388608 bytes when they are decompressed, not 1000"):
        read(data, 1000, zeros)


def test_other_rows_than_the_footer_says_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="it has 300 rows, not 299"):
        read_batch(pa.py_buffer(message_of("lz4")), BATCH.schema, 299, BATCH.nbytes)


def with_buffer(column: int, buffer: int, change: Change) -> bytes:
    """A message in which a buffer of numbers has other ones."""
    buffers = BATCH.column(column).buffers()
    numbers = np.frombuffer(buffers[buffer], np.int32).copy()
    data, whole = bytearray(message_of(None)), numbers.tobytes()[: 4 * (BATCH.num_rows + 1)]
    at = bytes(data).index(whole)
    change(numbers)
    changed = numbers.tobytes()[: len(whole)]
    data[at : at + len(changed)] = changed
    return bytes(data)


def put(place: int, number: int) -> Change:
    def change(numbers: Numbers) -> None:
        numbers[place] = number

    return change


@pytest.mark.parametrize("column", [1, 2, 3], ids=["text", "bytes", "list"])
@pytest.mark.parametrize(("place", "number"), [(5, 1 << 30), (5, -1), (300, 1 << 30), (0, -5), (299, 0)])
def test_a_value_outside_of_its_buffer_is_refused(column: int, place: int, number: int) -> None:
    with pytest.raises(MalformedMessage):
        read(with_buffer(column, 1, put(place, number)), None)


def test_text_that_is_no_utf_8_is_read_as_it_was_written() -> None:
    """Spark's strings may be any bytes."""
    data = message_of(None).replace("éé".encode(), b"\xff\xc3\xa9\xff", 1)
    assert b"\xff\xc3" in read(data, None).column(1).cast(pa.binary()).to_pylist()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 8, b"\xff\xff\xff\xff\x00\x00\x00\x00", b"x" * 100, b"\xff" * 4 + b"\x40\0\0\0" + b"\xff" * 64],
)
@pytest.mark.parametrize("size_bytes", [None, 100])
def test_other_bytes_are_no_message(data: bytes, size_bytes: int | None) -> None:
    with pytest.raises(MalformedMessage):
        read(data, size_bytes)


def test_a_stream_is_checked_as_a_block_is() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, BATCH.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_batch(BATCH)
        writer.write_batch(BATCH.slice(5))
    data = bytearray(sink.getvalue().to_pybytes())
    assert list(stream_batches(bytes(data))) == [BATCH, BATCH.slice(5)]
    struct.pack_into("<q", data, declared_at(bytes(data), b"\x04\x22\x4d\x18"), 1 << 32)
    with pytest.raises(MalformedMessage, match="cannot have 4294967296"):
        list(stream_batches(bytes(data)))
    for length in range(0, 160, 7):
        with pytest.raises(MalformedMessage):
            list(stream_batches(bytes(data[:length])))
    with pytest.raises(MalformedMessage):
        read_stream(b"nothing")


def test_a_value_of_a_stream_outside_of_its_buffer_is_refused() -> None:
    stream = BATCH.schema.serialize().to_pybytes() + with_buffer(1, 1, put(5, 1 << 30))
    with pytest.raises(MalformedMessage, match="do not ascend"):
        list(stream_batches(stream))


def test_a_stream_of_types_whose_values_are_elsewhere_is_refused() -> None:
    batch = pa.record_batch({"x": pa.array(["a"]).dictionary_encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(MalformedMessage, match="the field 'x' has the type"):
        read_stream(sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    "kind",
    [pa.dictionary(pa.int8(), pa.string()), pa.list_(pa.dense_union([pa.field("a", pa.int8())])), pa.json_()],
    ids=["dictionary", "union", "extension"],
)
def test_a_schema_of_types_whose_values_are_elsewhere_is_refused(kind: pa.DataType) -> None:
    schema = pa.schema([pa.field("x", pa.struct([("in", kind)]))])
    with pytest.raises(ValueError, match="has the type"):
        require_plain(schema)
    with pytest.raises(CorruptionError, match="A stored schema is of an unknown form"):
        decode_schema(bytes(schema.serialize()))


@pytest.mark.parametrize("schema", [b"", b"x", b"\xff" * 100])
def test_bytes_that_are_no_schema_are_damage(schema: bytes) -> None:
    with pytest.raises(CorruptionError, match="A stored schema is of an unknown form"):
        decode_schema(schema)


@pytest.mark.parametrize(("kind", "expires_by"), [("nothing", ""), ("value", "never")])
def test_a_state_of_an_unknown_kind_is_damage(kind: str, expires_by: str) -> None:
    stored = StateSchema("s", kind, b"", bytes(pa.schema([("v", pa.int8())]).serialize()), expires_by)
    with pytest.raises(CorruptionError, match="description of state 's'"):
        StateDescriptor.from_stored(stored)


def test_a_run_that_is_longer_than_its_object_takes_no_memory() -> None:
    store = MemoryStore(ManualClock())
    store.put("op-1/runs/1/0/x", bytes(100))
    memory = RunMemory()
    for length in (1 << 40, (1 << 62) - 1):
        with pytest.raises(CorruptionError, match="is damaged or truncated"):
            read_run(store, StoredRun("op-1/runs/1/0/x", 0, length, bytes(16), 1, 0, 1), "a run", memory=memory)
