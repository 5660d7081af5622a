"""Damages stored files in ways that their checksums do not show, and reads them: a process of its own.

``python -m tests.stored_fuzz KINDS SEED ROUNDS MEMORY_MB`` exits with 0 if nothing but errors of statelog came out.
Otherwise it prints the seeds of rounds with their tracebacks, or dies. Kinds are those of KINDS, with commas between.
"""

from __future__ import annotations

import json
import logging
import random
import resource
import shutil
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from statelog import list_checkpoints, read_state
from statelog.convert.ddl import parse_type_json
from statelog.convert.state_tables import Positions, StateColumns
from statelog.errors import StatelogError
from statelog.history.footprint import Footprint
from statelog.history.pins import Consumer, Pin, read_pin, write_pin
from statelog.history.query_history import read_history
from statelog.local.materializer import Grant, Materializer
from statelog.local.runs import LocalRun, LocalRuns
from statelog.log.entry import FRAME_HEADER_BYTES, FRAME_MAGIC
from statelog.operators.unkeyed.snapshot import Snapshot, StateElements, encode_snapshot
from statelog.queries.save import TableFile
from statelog.reading.savepoint import Manifest, SavedFile, SavedOperator, SavedState
from statelog.runs import digests
from statelog.runs.key_groups import HashRange
from statelog.runs.keys import KeyCodec
from statelog.runs.merge import Garbage, merge_runs
from statelog.runs.reader import Run
from statelog.runs.schema import TAIL, Operation, StateDescriptor, StateKind, StateSchema, change_schema, encode_schema
from statelog.runs.times import Moment
from statelog.runs.writer import RunWriter, StateChanges, encode_run
from statelog.sealed import seal
from statelog.storage import LocalStore
from statelog.tasks.output_task import StoredRows, stored_batches, stored_columns
from tests.model.engine import Engine

FIXTURES: Final = Path(__file__).parent / "compat"
Round = Callable[[random.Random], None]

_WORDS: Final = [
    *("", "x", "../x", "/etc/x", "a/../../b", "log", "pins", "\x1b[2J", "s3://b!/x", "op!/../x", "%2e%2e", "\x00"),
    "y" * 300,
]
_NUMBERS: Final = [
    *(0, 1, -1, 2, 7, 255, 32767, 32768, (1 << 31) - 1, 1 << 31, 1 << 32),
    *(1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63)),
]
KEYS: Final = pa.schema([("user", pa.string()), ("n", pa.int64())])
_VALUES: Final = pa.schema(
    [("a", pa.string()), ("b", pa.list_(pa.int32())), ("c", pa.map_(pa.string(), pa.struct([("d", pa.bool_())])))]
)


# ---- Damage ----


def damaged(value: Any, rng: random.Random) -> Any:
    """A document with another value somewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {name: one for name, one in value.items() if name != key}
        if rng.random() < 0.1:
            return {**value, rng.choice(_WORDS): value[key]}
        return {**value, key: damaged(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value[:at]
        if rng.random() < 0.1:
            return [*value, value[at]]
        return [*value[:at], damaged(value[at], rng), *value[at + 1 :]]
    if isinstance(value, bytes) and rng.random() < 0.8:
        return flipped(value, rng)
    if isinstance(value, int) and rng.random() < 0.8:
        return rng.choice([*_NUMBERS, value + 1, value - 1])
    if isinstance(value, str) and rng.random() < 0.8:
        return rng.choice([*_WORDS, value + "/..", value[:-1], "../" + value, value + "\x9b"])
    return rng.choice([None, True, 1.5, float("nan"), [], {}, b"", *_WORDS, *_NUMBERS])


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Bytes with some others, rather at the beginning; or cut, or with more."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        if not changed:
            break
        at = rng.randrange(len(changed)) if rng.random() < 0.5 else min(rng.randrange(700), len(changed) - 1)
        match rng.randrange(6):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                number = struct.pack("<q", rng.choice([one for one in _NUMBERS if one < 1 << 63]))[
                    : rng.choice([1, 4, 8])
                ]
                changed[at : at + len(number)] = number
            case 3:
                aligned = at // 8 * 8
                changed[aligned : aligned + 8] = struct.pack("<Q", rng.choice(_NUMBERS) % (1 << 64))
            case 4:
                del changed[at : at + rng.choice([1, 8, 64])]
            case 5:
                changed[at:at] = rng.randbytes(rng.choice([1, 8, 64]))
    return bytes(changed)


def damaged_document(data: bytes, rng: random.Random) -> bytes:
    """MessagePack with another value somewhere, or another byte."""
    if rng.random() < 0.2:
        return flipped(data, rng)
    return msgspec.msgpack.encode(damaged(msgspec.msgpack.decode(data), rng))


def resealed(data: bytes, rng: random.Random) -> bytes:
    """A sealed document with another value somewhere, and a checksum that fits."""
    body = data[: data.rindex(b'"checksum"')]
    if rng.random() < 0.2:
        body = flipped(body, rng)
    else:
        document = json.loads(data)
        del document["checksum"]
        with suppress(TypeError):  # bytes are no JSON
            body = json.dumps(damaged(document, rng))[:-1].encode("utf-8", "surrogatepass") + b",\n "
    return body + b'"checksum": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()


def reframed(log: bytes, rng: random.Random) -> bytes:
    """A log file with a damaged entry whose checksums fit."""
    frames: list[tuple[bytes, bytes]] = []
    at = 0
    while at < len(log):
        _, index_bytes, payload_bytes, _, _ = struct.unpack_from("<4sIQQQ", log, at)
        start = at + FRAME_HEADER_BYTES
        at = start + index_bytes + payload_bytes
        frames.append((log[start : start + index_bytes], log[start + index_bytes : at]))
    place = rng.randrange(len(frames))
    index, payload = frames[place]
    frames[place] = damaged_document(index, rng), payload
    return b"".join(_frame(index, payload) for index, payload in frames)


def _frame(index: bytes, payload: bytes) -> bytes:
    head = struct.pack("<4sIQQ", FRAME_MAGIC, len(index), len(payload), xxhash.xxh3_64_intdigest(index))
    return head + xxhash.xxh3_64_digest(head)[::-1] + index + payload


def rerun(run: bytes, rng: random.Random) -> bytes:
    """A run with a damaged block or footer, whose checksums fit."""
    length, _, magic = TAIL.unpack(run[-TAIL.size :])
    body, footer = bytearray(run[: -TAIL.size - length]), msgspec.msgpack.decode(run[-TAIL.size - length : -TAIL.size])
    if rng.random() < 0.7:
        block = rng.choice(footer["blocks"])
        start, end = block[1], block[1] + block[2]
        data = flipped(bytes(body[start:end]), rng)[: end - start]
        body[start : start + len(data)] = data
        block[6] = xxhash.xxh3_64_intdigest(bytes(body[start:end]))
        encoded = msgspec.msgpack.encode(footer)
    else:
        encoded = damaged_document(msgspec.msgpack.encode(footer), rng)
    return bytes(body) + encoded + TAIL.pack(len(encoded), xxhash.xxh3_64_intdigest(encoded), magic)


# ---- What is damaged, and how it is read ----


def states() -> list[StateDescriptor]:
    return [
        StateDescriptor("value", StateKind.VALUE, _VALUES),
        StateDescriptor("map", StateKind.MAP, pa.schema([("v", pa.float64())]), pa.schema([("k", pa.string())])),
        StateDescriptor("timer", StateKind.TIMER, pa.schema([("time", pa.int64())])),
    ]


def changes_of(state: StateDescriptor, rows: int = 40) -> pa.RecordBatch:
    """Changes of a state with several types."""
    codec = KeyCodec(KEYS)
    keys = [codec.encode((f"user {number} é", number)) for number in range(rows)]
    hashes = np.sort(np.arange(rows, dtype=np.uint64) * np.uint64(1 << 58))
    entry = [b""] * rows
    values: list[pa.Array] = []
    match state.kind:
        case StateKind.VALUE:
            rows_of = [
                {"a": "ü" * number, "b": [number] * (number % 3), "c": [("k", {"d": True})]} for number in range(rows)
            ]
            values = [pa.array([row[field.name] for row in rows_of], field.type) for field in _VALUES]
        case StateKind.MAP:
            entry = [KeyCodec(state.entry_schema).encode((f"m{number}",)) for number in range(rows)]
            values = [pa.array(np.arange(rows, dtype=float))]
        case _:
            values = [pa.array(np.arange(rows)[::-1]), pa.nulls(rows, pa.uint32())]
    own = [pa.array(hashes), pa.array(keys), pa.array(entry), pa.array(np.full(rows, Operation.PUT, np.uint8))]
    return pa.RecordBatch.from_arrays([*own, pa.nulls(rows, pa.int64()), *values], schema=change_schema(state))


def run_of(compression: str | None) -> bytes:
    return encode_run(
        [StateChanges(state, [changes_of(state)]) for state in states()], compression=compression, block_rows=16
    )


def read_values(rows: pa.RecordBatch | pa.Table) -> None:
    """Convert all values; some are no values of Python's, as Spark's strings may be no UTF-8."""
    with suppress(ValueError, OverflowError):
        rows.to_pylist()


def read_run(run: Run) -> None:
    """Search, convert and merge a run's rows."""
    for section in run.sections.values():
        columns = StateColumns(KEYS, section.state)
        positions = Positions()
        for block in section.blocks:
            with suppress(StatelogError):
                batch = block.batch
                read_values(columns.to_rows(batch, positions))
                block.match(block.hashes, batch.column(1))
                block.sizes(*block.spans(block.hashes))
                if section.state.kind is StateKind.TIMER:
                    read_values(block.take(block.due(-5, 20)))
    for state in states():
        with suppress(StatelogError):
            run.section(state)
    sink = pa.BufferOutputStream()
    merge_runs(
        [run, run], RunWriter(sink, compression=None, block_rows=64), is_bottom=True, within=HashRange(0, 1 << 63)
    )


def stored_runs(folder: Path) -> Round:
    runs = [run_of(compression) for compression in ("lz4", "zstd", None)]
    return lambda rng: read_run(Run(pa.py_buffer(rerun(rng.choice(runs), rng)), "x.run", is_stored=True))


def local_runs(folder: Path) -> Round:
    run, local = run_of(None), LocalRun(0, 1, bytes(16), bytes(16))

    def one(rng: random.Random) -> None:
        directory = folder / str(rng.random())
        directory.mkdir()
        (directory / local.file_name).write_bytes(rerun(run, rng))
        (directory / rng.choice(["x", "1-2.tmp", "-5-x.tmp", "²-x.tmp", "9" * 200])).touch()
        runs = LocalRuns(directory)
        with suppress(FileNotFoundError):
            read_run(runs.open(local))
        runs.sweep([], 5)

    return one


def snapshots(folder: Path) -> Round:
    state = StateSchema("units", "operator-list", b"", encode_schema(_VALUES))
    rows = pa.RecordBatch.from_arrays(changes_of(states()[0]).columns[5:], names=["v0", "v1", "v2"])
    data = encode_snapshot([StateElements.of(state, [rows])])

    def one(rng: random.Random) -> None:
        magic, length, _ = struct.unpack_from("<8sIQ", data)
        index, at = data[20 : 20 + length], 20 + length + -(20 + length) % 64
        body = data[at:]
        if rng.random() < 0.6:
            sections = msgspec.msgpack.decode(index)
            body = flipped(body, rng)
            sections[0][4] = xxhash.xxh3_128_digest(body[: sections[0][2]])
            index = msgspec.msgpack.encode(sections)
        else:
            index = damaged_document(index, rng)
        head = struct.pack("<8sIQ", magic, len(index), xxhash.xxh3_64_intdigest(index)) + index
        for section in Snapshot(head + bytes(-len(head) % 64) + body, "x").sections.values():
            read_values(section.rows)

    return one


def outputs(folder: Path) -> Round:
    parts: list[bytes] = []
    for compression in ("lz4", "zstd", None):
        rows = StoredRows('{"type":"struct","fields":[{"name":"a","nullable":true,"metadata":{},"type":"long"}]}')
        rows.add(changes_of(states()[0]).select([0, 1, 5, 6, 7]))
        parts.append(rows.take_part(compression)[0])

    def one(rng: random.Random) -> None:
        data = flipped(rng.choice(parts), rng)
        with suppress(StatelogError):
            parse_type_json(stored_columns(data, "x"), "x")
        for batch in stored_batches(data, "x"):
            read_values(batch)

    return one


def descriptions(folder: Path) -> Round:
    texts = [
        {"type": "struct", "fields": [{"name": "a", "nullable": True, "metadata": {}, "type": kind}]}
        for kind in ("decimal(10,2)", {"type": "array", "elementType": "string", "containsNull": True}, {"type": "udt"})
    ]

    def one(rng: random.Random) -> None:
        with suppress(TypeError):
            parse_type_json(json.dumps(damaged(rng.choice(texts), rng)), "x")

    return one


def _location(folder: Path) -> tuple[Path, Path]:
    engine = Engine(folder / "query", lambda key: key[0] or 0)
    engine.start(2, 0)
    for batch in range(3):
        for subtask, commands in enumerate(
            engine.parts([((number << 60, "a"), ("set", batch)) for number in range(8)])
        ):
            engine.run_commands(batch, subtask, commands)
    engine.coordinator.close()
    location = Path(engine.location)
    [log] = location.glob("log/*.log")
    return location, log


def _fixture(folder: Path, name: str) -> Path:
    """A copy of a location that an earlier version has written."""
    return Path(shutil.copytree(FIXTURES / name, folder / name.replace("/", "-")))


def _damaged_log(location: Path, whole: dict[Path, bytes], rng: random.Random) -> None:
    """Damage a file of a log, whose files are otherwise as they were."""
    log = rng.choice([path for path in whole if path.parent.parent == location])
    for path, data in whole.items():
        if path.parent.parent == location:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(reframed(data, rng) if path == log else data)


def logs(folder: Path) -> Round:
    """Logs of several kinds of queries, for readers."""
    locations = [_location(folder)[0]]
    locations += [_fixture(folder, name) for name in ("fixtures/v1/materialized", "operators/v1/inline", "queries/v1")]
    whole = {path: path.read_bytes() for location in locations for path in location.glob("log/*.log")}

    def one(rng: random.Random) -> None:
        location = rng.choice(locations)
        _damaged_log(location, whole, rng)
        history = read_history(LocalStore(location))
        history.require_complete("x")
        for entry in history.entries:
            history.object_names()
            history.histories_at(entry.batch)
        list_checkpoints(str(location))
        for uid, identity in list(history.names.items())[:3]:
            newest = history.histories[identity].latest
            for state in [] if newest is None else newest.states[:2]:
                with suppress(StatelogError):
                    read_values(read_state(str(location), uid, state.name).read_all())

    return one


def starts(folder: Path) -> Round:
    """Logs of a query that goes on."""
    location = _fixture(folder, "fixtures/v1/materialized")
    whole = {path: path.read_bytes() for path in location.rglob("*") if path.is_file()}

    def one(rng: random.Random) -> None:
        shutil.rmtree(folder / "start", ignore_errors=True)
        for path, data in whole.items():
            copy = folder / "start" / "location" / path.relative_to(location)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(data)
        own = folder / "start" / "location"
        _damaged_log(
            own, {own / path.relative_to(location): data for path, data in whole.items() if "log" in path.parts}, rng
        )
        engine = Engine(folder / "start", lambda key: 0)
        try:
            engine.start(rng.choice([1, 3]), 6)
            for subtask in range(engine.parallelism):
                engine.run_commands(6, subtask, [((1, None), ("set", 1))] if subtask == 0 else [])
        finally:
            if hasattr(engine, "coordinator"):
                engine.coordinator.close()

    return one


def pins(folder: Path) -> Round:
    location, _ = _location(folder)
    store, name = LocalStore(location), f"pins/{2:020}-0123.json"
    query = read_history(store)
    write_pin(store, name, Pin.on(Footprint.of(query, 2)))
    whole = Pin.on(Footprint.of(query, 2))
    [identity] = [one.identity for one in whole.operators]
    consumers = f"pins/{2:020}-4567.json"
    history = query.histories[identity]
    write_pin(
        store,
        consumers,
        Pin.on(Footprint.of_changes(history, 2, since=1), Consumer(100), owner="o", made_ms=1, lasts_s=9.0),
    )
    data = {one: store.read(one) for one in (name, consumers)}

    def one(rng: random.Random) -> None:
        chosen = rng.choice(list(data))
        store.put(chosen, resealed(data[chosen], rng))
        pin = read_pin(store, chosen)
        assert pin is not None
        pin.covers(whole)
        pin.with_later(query)
        pin.is_on_line(query)
        pin.query(store)
        pin.lacks(store)

    return one


def savepoints(folder: Path) -> Round:
    state = states()[0]
    columns = StateColumns(KEYS, state)
    table = TableFile(columns.schema)
    table.write(columns.to_rows(changes_of(state), Positions()))
    store = LocalStore(folder / "savepoint")
    file = table.store(store, "operators/op/states/value", 0)
    parquet = store.read(file.name)
    saved = SavedState(state.to_stored(), {}, [file])
    operator = SavedOperator("op", "op", 1, encode_schema(KEYS), [saved], 1000, 0)
    source = SavedFile("spark/sources/0/0", 1, bytes(16))
    manifest = Manifest(3, "query", 1000, {"2": "v1\n{}", "3": "v1\n{}"}, {"3": "v1\n{}"}, [source], [operator])
    manifest.write(store)
    sealed = store.read("manifest.json")

    def one(rng: random.Random) -> None:
        if rng.random() < 0.5:
            store.put(file.name, parquet)
            store.put("manifest.json", resealed(sealed, rng))
        else:
            data = flipped(parquet, rng)
            store.put(file.name, data)
            described = msgspec.structs.replace(file, length=len(data), checksum=digests.checksum(data))
            own = msgspec.structs.replace(saved, files=[described])
            changed = msgspec.structs.replace(operator, states=[own])
            msgspec.structs.replace(manifest, operators=[changed]).write(store)
        read_values(read_state(str(folder / "savepoint"), "op", "value").read_all())

    return one


class Job(msgspec.Struct):
    """What the file of a job has."""

    run_id: str
    target: str
    merging: dict[str, Any]
    garbage: Garbage
    grant: str


def jobs(folder: Path) -> Round:
    """A job's progress beside the local runs."""
    local = LocalRuns(folder / "local")
    (folder / "local" / "job").mkdir(parents=True)
    materializer = Materializer(
        local=local,
        within=HashRange(0, (1 << 64) - 1),
        genesis=bytes(16),
        run_id="run",
        compression=None,
        garbage=Garbage(Moment(0, 0), {}),
        max_space_amplification=2.0,
        open_store=lambda: LocalStore(folder / "store"),
        monotonic_s=lambda: 0.0,
        token="1-token",
    )
    names = [LocalRun(0, batch, bytes(16), bytes(16)).file_name for batch in range(3)]
    path = folder / "local" / "job" / "job.json"
    merging = {"inputs": names[:2], "position": None, "written": None, "size_bytes": 0}
    data = seal(Job("run", names[2], merging, Garbage(Moment(0, 0), {}), "g"), "materialization job", 1)
    path.write_bytes(data)
    assert materializer.inputs() == set(names), "the file is one that a job has written"

    def one(rng: random.Random) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(resealed(data, rng))
        for name in materializer.inputs():
            assert name == "" or LocalRun.parse(name) is not None, name
        materializer.result(Grant("g", b"", [], "op-1/runs/1/0"))

    return one


KINDS: Final[dict[str, Callable[[Path], Round]]] = {
    "descriptions": descriptions,
    "jobs": jobs,
    "local-runs": local_runs,
    "logs": logs,
    "outputs": outputs,
    "pins": pins,
    "savepoints": savepoints,
    "snapshots": snapshots,
    "starts": starts,
    "stored-runs": stored_runs,
}


def run(kind: str, seed: int, rounds: int) -> tuple[list[int], int]:
    """Run rounds of a kind; returns the seeds of those that raised anything but an error of statelog, and how many
    found no damage.
    """
    wrong: list[int] = []
    undamaged = 0
    with tempfile.TemporaryDirectory() as folder:
        one = KINDS[kind](Path(folder))
        for number in range(seed, seed + rounds):
            try:
                one(random.Random(number))
                undamaged += 1
            except StatelogError:
                continue
            except Exception:
                traceback.print_exc(limit=-5)
                wrong.append(number)
    return wrong, undamaged


def main(kinds: str, seed: str, rounds: str, memory_mb: str) -> int:
    """Limit the memory of this process, then damage and read files of some kinds."""
    logging.getLogger("statelog").setLevel(logging.CRITICAL)
    failed = 0
    for kind in kinds.split(","):
        resource.setrlimit(resource.RLIMIT_AS, (_held_bytes() + (int(memory_mb) << 20), resource.RLIM_INFINITY))
        wrong, undamaged = run(kind, int(seed), int(rounds))
        print(f"{kind}: {undamaged} rounds without an error, {len(wrong)} with a wrong one: {wrong[:20]}", flush=True)
        failed += len(wrong)
    return bool(failed)


def _held_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    sys.exit(main(*sys.argv[1:]))
