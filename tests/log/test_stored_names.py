"""Names in stored documents lead to one place: the one of their kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from msgspec.structs import replace

from statelog.errors import CorruptionError, ErrorKind
from statelog.history.footprint import Footprint, OperatorFootprint
from statelog.history.pins import Consumer, Pin, pin_name, read_pin, write_pin
from statelog.log.entry import Entry, FrameHeader, QueryCheckpoint, decode_index
from statelog.log.open import new_identity
from statelog.log.references import SegmentRef, is_pin, require_objects
from statelog.reading.savepoint import Manifest, SavedFile, SavedOperator, SavedState
from statelog.runs.schema import StateSchema
from statelog.storage import LocalStore
from statelog.storage.links import link
from statelog.storage.names import is_plain, name_part
from tests.entries import checkpoint_of, entry_of
from tests.short_log import ShortLog, base, base_range

ELSEWHERE = [
    *(
        "..",
        ".",
        "",
        "/etc/passwd",
        "../x",
        "a/../b",
        "a//b",
        "a/./b",
        "a/",
        "/a",
        "a\\..\\b",
        "a\0b",
        "a\nb",
        "a\x9bb",
    ),
]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_plain_name_stays_below_its_root(name: str) -> None:
    assert not is_plain(name)
    assert is_plain(name_part(name)) or not name


@pytest.mark.parametrize("name", ["a", "a/b.c", "...", "a/...", ".a", "ü", "a b", "offsets/12", "sources/0/.x.crc"])
def test_other_names_are_plain(name: str) -> None:
    assert is_plain(name)


def decoded(entry: QueryCheckpoint) -> Entry:
    index = msgspec.msgpack.encode(entry)
    header = FrameHeader(len(index), 0, xxhash.xxh3_64_intdigest(index))
    return decode_index(header, index, name="log/7.log", offset=100, number=7)


def segment(name: str, **changed: Any) -> SegmentRef:
    return replace(SegmentRef(0, 1, b"", 0, 1, 1, 1, name), **changed)


OWN = [
    *("op-1/changes/1/0/3-x.run", "op%20-1/runs/1/0/5-job/7-x-0.run", "op-1/initial/run/0-5.arrow", f"log/{7:020}.log"),
]


@pytest.mark.parametrize("name", ["", *OWN, *(link("s3://bucket/parent", name) for name in OWN)])
def test_objects_of_operators_and_logs_are_read(name: str) -> None:
    assert isinstance(decoded(entry_of(checkpoint_of(0, [segment(name)]))), QueryCheckpoint)


FORGED = [
    *("precious.txt", "pins/x.json", "log/1.log", "op-1/precious.txt", "op-1/changes", "op-1/changes/../../x"),
    *("../op-1/changes/x", "op-1/changes/", "/op-1/changes/x", "s3://bucket/parent!/precious.txt", "/x!/../changes/y"),
    *("a!/changes/x", "op-1/changes/x\0", "op-1/changes/\x1b"),
]


@pytest.mark.parametrize("name", FORGED)
def test_an_entry_that_names_another_object_is_refused(name: str) -> None:
    """Wherever it names one: no such name is read, counted or deleted."""
    with pytest.raises(CorruptionError, match="not a name of an operator's object") as caught:
        decoded(entry_of(checkpoint_of(0, [segment(name)])))
    assert caught.value.kind is ErrorKind.FORMAT
    forged = base(1)
    [level] = forged.levels
    forged = replace(forged, levels=[replace(level, runs=[replace(level.runs[0], name=name)])])
    for parts in ({"bases": [forged]}, {"base_ranges": [replace(base_range(1), base=forged)]}):
        with pytest.raises(CorruptionError, match="not a name of an operator's object"):
            decoded(entry_of(checkpoint_of(0, **parts)))
    with pytest.raises(CorruptionError, match="not a name of an operator's object"):
        require_objects([name], "a pin")


@pytest.mark.parametrize("identity", [*ELSEWHERE, "log", "pins"])
def test_an_identity_that_leads_elsewhere_is_refused(identity: str) -> None:
    """Local directories and folders of objects are called by it."""
    with pytest.raises(CorruptionError, match="not an identity of an operator"):
        decoded(entry_of(checkpoint_of(0, identity=identity)))


@pytest.mark.parametrize("uid", ["op", "../..", "/", "", ".", "a\0", "log", "ü" * 300])
def test_every_uid_has_an_identity(uid: str) -> None:
    assert decoded(entry_of(checkpoint_of(0, identity=new_identity(uid, bytes(8)), uid=uid)))


@pytest.mark.parametrize(
    "changed",
    [
        {"parallelism": 0}, {"parallelism": -1}, {"parallelism": 32_769}, {"parallelism": 1 << 40},
        {"segments": [segment("", subtask=1)]}, {"segments": [segment("", subtask=-1)]},
        {"segments": [segment("", offset=-1)]}, {"segments": [segment("", length=1 << 63)]},
        {"segments": [segment("", rows=-1)]}, {"element_counts": [[1], [1]]}, {"element_counts": [[1]]},
        {"batch": -1}, {"batch": 1 << 63}, {"bases": [replace(base(1), levels=[])]},
        {"bases": [replace(base(1), subtask=1)]}, {"base_ranges": [replace(base_range(1), first_hash=-1)]},
    ],
)  # fmt: skip
def test_numbers_that_no_writer_writes_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CorruptionError, match="of an unknown form"):
        decoded(entry_of(replace(checkpoint_of(0), **changed)))


def test_the_name_of_a_pin() -> None:
    assert is_pin(pin_name(7, b"token"))
    for name in (*FORGED, "pins/7-aa.json", f"pins/{7:020}-aa.txt", f"pins/{7:020}-.json", f"x/pins/{7:020}-aa.json"):
        assert not is_pin(name)


@pytest.mark.parametrize("name", FORGED)
def test_a_pin_that_names_another_object_is_refused(name: str, tmp_path: Path) -> None:
    store, whole = LocalStore(tmp_path), Pin.on(Footprint.of(ShortLog(2).query(), 1))
    write_pin(store, "pins/a", replace(whole, objects=[*whole.objects, name]))
    with pytest.raises(CorruptionError, match="not a name of an operator's object"):
        read_pin(store, "pins/a")


@pytest.mark.parametrize(
    "changed",
    [{"entries": []}, {"purpose": Consumer(5)}, {"purpose": Consumer(5), "since": 0, "operators": []}],
    ids=["entries", "since", "operators"],
)
def test_a_pin_that_does_not_say_what_it_keeps_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    store, whole = LocalStore(tmp_path), Pin.on(Footprint.of(ShortLog(2).query(), 1))
    write_pin(store, "pins/a", replace(whole, **changed))
    with pytest.raises(CorruptionError, match="does not say what it keeps"):
        read_pin(store, "pins/a")
    write_pin(store, "pins/b", replace(whole, operators=[OperatorFootprint("../x", "op", [], 0)]))
    with pytest.raises(CorruptionError, match="not an identity"):
        read_pin(store, "pins/b")


# ---- Savepoints ----


def manifest(**changed: Any) -> Manifest:
    state = SavedState(StateSchema("s", "value", b"", b""), {}, [SavedFile("operators/op/states/s/x", 1, b"")])
    operator = SavedOperator("op", "op", 1, b"", [state], 0, 0)
    source = SavedFile("spark/sources/0/1.compact", 1, b"")
    return replace(Manifest(2, "q", 0, {"1": "", "2": ""}, {"2": ""}, [source], [operator]), **changed)


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest().write(LocalStore(tmp_path))
    assert Manifest.read(LocalStore(tmp_path), "x") == manifest()


BATCHES = ["", "-1", "+1", "01", " 1", "1_0", "٣", "1.0", "1e3", "../../job.conf", "../commits/5", "a", "1\n", "9" * 30]


@pytest.mark.parametrize("field", ["offsets", "commits"])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_batch_of_a_manifest_that_is_no_number_is_refused(batch: str, field: str, tmp_path: Path) -> None:
    """Files of the restored checkpoint are called by it."""
    manifest(**{field: {"2": "v1", batch: "EVIL"}}).write(LocalStore(tmp_path))
    with pytest.raises(CorruptionError, match="is not a name of a file in a savepoint"):
        Manifest.read(LocalStore(tmp_path), "x")


@pytest.mark.parametrize("name", [*ELSEWHERE, "spark/offsets/9", "spark/sources/../../x", "spark/sources", "metadata"])
def test_a_file_of_a_manifest_that_is_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    store, [operator] = LocalStore(tmp_path), manifest().operators
    [state] = operator.states
    for changed in (
        manifest(sources=[SavedFile(name, 1, b"")]),
        manifest(operators=[replace(operator, states=[replace(state, files=[SavedFile(name, 1, b"")])])]),
        manifest(operators=[replace(operator, folder=f"{name}/.." if name else "")]),
    ):
        changed.write(store)
        with pytest.raises(CorruptionError, match="is not a name of a file in a savepoint"):
            Manifest.read(store, "x")


def test_a_manifest_with_a_name_twice_is_damaged(tmp_path: Path) -> None:
    store, [operator] = LocalStore(tmp_path), manifest().operators
    for changed in ([operator, operator], [replace(operator, states=[*operator.states, *operator.states])]):
        manifest(operators=changed).write(store)
        with pytest.raises(CorruptionError, match="a name occurs twice"):
            Manifest.read(store, "x")
