"""Sealed documents: what was sealed is read, and nothing else is."""

from __future__ import annotations

import json

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from statelog import ConfigurationError, CorruptionError
from statelog.errors import ErrorKind
from statelog.sealed import seal, unseal


class Part(msgspec.Struct, frozen=True, array_like=True):
    name: str
    checksum: bytes


class Note(msgspec.Struct, frozen=True):
    text: str
    counts: dict[str, int]
    parts: list[Part]
    place: tuple[int, int] | None = None


class LaterNote(msgspec.Struct, frozen=True):
    text: str
    added: str = "nothing"


NOTE = Note('2 \N{SNOWMAN} "\\ }\n', {"a": 1}, [Part("x", b"\x00\xff" * 8)], (3, 1 << 32))
texts = st.text(st.characters(exclude_categories=["Cs"]))
notes = st.builds(
    Note,
    texts,
    st.dictionaries(texts, st.integers(-(1 << 63), (1 << 63) - 1), max_size=3),
    st.lists(st.builds(Part, texts, st.binary(max_size=20)), max_size=3),
    st.none() | st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)),
)


def opened(data: bytes) -> Note:
    return unseal(data, Note, kind="note", version=1, name="folder/note.json")


@given(notes)
def test_what_was_sealed_is_read(note: Note) -> None:
    assert opened(seal(note, "note", 1)) == note


@given(notes, st.data())
def test_damage_is_refused_by_name(note: Note, data: st.DataObject) -> None:
    sealed = seal(note, "note", 1)
    damaged = bytearray(sealed)
    for place in data.draw(st.sets(st.integers(0, len(sealed) - 1), min_size=1, max_size=4)):
        damaged[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptionError, match=r"folder/note\.json"):
        opened(bytes(damaged))


def test_every_flipped_bit_is_refused() -> None:
    sealed = seal(NOTE, "note", 1)
    for bit in range(len(sealed) * 8):
        flipped = bytearray(sealed)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptionError, match=r"folder/note\.json"):
            opened(bytes(flipped))


def test_every_torn_document_is_refused() -> None:
    sealed = seal(NOTE, "note", 1)
    for length in range(len(sealed)):
        with pytest.raises(CorruptionError, match=r"folder/note\.json"):
            opened(sealed[:length])
    for rest in (b"\n", b"\0" * 512, sealed):
        with pytest.raises(CorruptionError, match=r"folder/note\.json"):
            opened(sealed + rest)


def test_any_reader_of_json_can_read_and_check_it() -> None:
    sealed = seal(NOTE, "note", 1)
    read = json.loads(sealed)
    assert list(read) == ["kind", "version", "text", "counts", "parts", "place", "checksum"]
    assert (read["kind"], read["version"], read["text"], read["counts"]) == ("note", 1, NOTE.text, {"a": 1})
    assert sealed[-49:] == f'"checksum": "{read["checksum"]}"\n}}\n'.encode()
    assert read["checksum"] == xxhash.xxh3_128_hexdigest(sealed[:-49])


def test_a_later_version_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"folder/note\.json.*version 2.*up to 1") as refused:
        opened(seal(NOTE, "note", 2))
    assert refused.value.kind is ErrorKind.UNSUPPORTED_FEATURE


def test_an_earlier_version_is_read() -> None:
    read = unseal(seal(NOTE, "note", 1), LaterNote, kind="note", version=2, name="note.json")
    assert read == LaterNote(NOTE.text, "nothing")


def test_another_kind_of_document_is_refused() -> None:
    for version in (1, 2):
        with pytest.raises(CorruptionError, match=r"folder/note\.json: it is a letter, not a note") as refused:
            opened(seal(NOTE, "letter", version))
        assert refused.value.kind is ErrorKind.FORMAT


def test_a_whole_document_with_other_fields_is_refused() -> None:
    with pytest.raises(CorruptionError, match=r"folder/note\.json: it is not a note") as refused:
        opened(seal(LaterNote("text"), "note", 1))
    assert refused.value.kind is ErrorKind.FORMAT
