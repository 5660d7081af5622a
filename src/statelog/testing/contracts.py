"""The conformance tests of a store, which the tests of an implementation subclass; they need pytest."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest

from statelog.errors import ConfigurationError, ErrorKind, StorageError
from statelog.storage.store import Store

__all__ = ["StoreContract"]

DATA = bytes(range(256))
NAMES = (
    "a b",
    "a%20b",
    "a+b",
    "a&b=c;d",
    "a#b?c",
    "a~b",
    "a*'()!b",
    "a\\b",
    "\u00e4/\u65e5\u672c/\U0001f600",
    "...",
    "a..",
    ".a",
)
REFUSABLE = ("a\\b",)


class StoreContract:
    """Conformance tests of a store; pytest collects them from a subclass.

    A subclass overrides the fixture :meth:`store`, which gives an empty store for each test.
    """

    @pytest.fixture
    def store(self) -> Store:
        """Return an empty store."""
        raise NotImplementedError

    def test_new_store_is_empty(self, store: Store) -> None:
        assert store.list() == []
        store.close()

    def test_put_then_read(self, store: Store) -> None:
        store.put("a/b/c.run", memoryview(DATA))
        store.put("empty", b"")
        assert store.read("a/b/c.run") == DATA
        assert store.size_bytes("a/b/c.run") == len(DATA)
        assert store.read("empty") == b""
        assert store.size_bytes("empty") == 0

    def test_put_replaces_the_object(self, store: Store) -> None:
        for data in (DATA, b"", b"short"):
            store.put("x", data)
            assert store.read("x") == data
            assert [info.size_bytes for info in store.list()] == [len(data)]

    def test_names_are_taken_as_they_are(self, store: Store) -> None:
        """A store may refuse a name that it would have to change."""
        names = []
        for name in NAMES:
            try:
                assert store.put_if_absent(f"names/{name}", name.encode())
                names.append(name)
            except ConfigurationError:
                assert name in REFUSABLE
        assert [info.name for info in store.list()] == sorted(f"names/{name}" for name in names)
        for name in names:
            assert store.read(f"names/{name}") == name.encode()
            assert store.list(f"names/{name}")[0].name == f"names/{name}"
        store.delete([f"names/{name}" for name in names])
        assert store.list() == []

    @pytest.mark.parametrize(
        ("offset", "length", "expected"),
        [
            (0, None, DATA),
            (10, 5, DATA[10:15]),
            (250, None, DATA[250:]),
            (250, 100, DATA[250:]),
            (0, 0, b""),
            (256, 1, b""),
            (300, 10, b""),
            (0, 1 << 40, DATA),
        ],
    )
    def test_ranges(self, store: Store, offset: int, length: int | None, expected: bytes) -> None:
        store.put("x", DATA)
        assert store.read("x", offset=offset, length=length) == expected

    @pytest.mark.parametrize(
        ("offset", "length", "expected"),
        [(0, 256, DATA), (10, 5, DATA[10:15]), (250, 100, DATA[250:]), (300, 10, b""), (7, 0, b"")],
    )
    def test_reading_into_a_buffer(self, store: Store, offset: int, length: int, expected: bytes) -> None:
        store.put("x", DATA)
        buffer = bytearray(length)
        assert store.read_into(memoryview(buffer), "x", offset=offset) == len(expected)
        assert buffer == expected.ljust(length, b"\0")

    def test_missing_object_has_a_kind_of_its_own(self, store: Store) -> None:
        store.put("folder/x", DATA)
        for name in ("y", "folder/y", "folder", "folder/x/y"):
            with pytest.raises(StorageError) as reading:
                store.read(name, offset=2, length=3)
            with pytest.raises(StorageError) as sizing:
                store.size_bytes(name)
            with pytest.raises(StorageError) as reading_nothing:
                store.read(name, length=0)
            with pytest.raises(StorageError):
                store.read_into(memoryview(bytearray(3)), name)
            if name != "folder":
                assert reading.value.kind == ErrorKind.OBJECT_MISSING
                assert reading_nothing.value.kind == ErrorKind.OBJECT_MISSING
            assert sizing.value.kind == ErrorKind.OBJECT_MISSING

    def test_put_if_absent_keeps_the_first(self, store: Store) -> None:
        assert store.put_if_absent("log/1", b"first")
        assert not store.put_if_absent("log/1", b"second, longer")
        assert store.read("log/1") == b"first"

    def test_put_if_absent_has_one_winner(self, store: Store) -> None:
        writers = 16
        start = Barrier(writers)

        def race(writer: int) -> list[int]:
            won = []
            for number in range(10):
                start.wait()
                if store.put_if_absent(f"log/{number}", b"%d" % writer * 1000):
                    won.append(number)
            return won

        with ThreadPoolExecutor(writers) as pool:
            wins = list(pool.map(race, range(writers)))
        assert sorted(number for won in wins for number in won) == list(range(10))
        for writer, won in enumerate(wins):
            for number in won:
                assert store.read(f"log/{number}") == b"%d" % writer * 1000

    def test_list_is_sorted_and_filtered(self, store: Store) -> None:
        for name in ("b/2", "b/10/x", "a", "b.log", "ba/1", "b/1"):
            store.put(name, name.encode())
        everything = ["a", "b.log", "b/1", "b/10/x", "b/2", "ba/1"]
        assert [info.name for info in store.list()] == everything
        for prefix in ("b", "b/", "b/1", "b/10/", "ba/1", "c", "c/d", "a/"):
            expected = [name for name in everything if name.startswith(prefix)]
            assert [info.name for info in store.list(prefix)] == expected
        assert [info.size_bytes for info in store.list()] == [len(name) for name in everything]
        assert all(info.modified_s > 0 for info in store.list())

    def test_delete(self, store: Store) -> None:
        for name in ("a/b/1", "a/b/2", "a/3"):
            store.put(name, DATA)
        store.delete(["a/b/1", "never/there", "a/b/2", "a/b/1"])
        assert [info.name for info in store.list()] == ["a/3"]
        store.delete(["a/3"])
        store.delete([])
        assert store.list() == []
        assert store.put_if_absent("a/b/1", b"again")
        assert store.read("a/b/1") == b"again"

    def test_deleting_while_others_write(self, store: Store) -> None:
        def write_and_delete(writer: int) -> None:
            for number in range(20):
                name = f"shared/folder/{writer}-{number}"
                store.put(name, DATA)
                assert store.read(name) == DATA
                store.list("shared/")
                store.delete([name])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write_and_delete, range(4)))
        assert store.list() == []

    @pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../x", "a//b", "./a", "a/", "a/.", "a\0b"])
    def test_bad_names_are_refused(self, store: Store, name: str) -> None:
        with pytest.raises(ConfigurationError):
            store.put(name, DATA)
        with pytest.raises(ConfigurationError):
            store.read(name)

    @pytest.mark.parametrize("prefix", ["..", "/", "/a", "../a", "a/../b"])
    def test_bad_prefixes_are_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises(ConfigurationError):
            store.list(prefix)

    def test_pickles_while_in_use(self, store: Store) -> None:
        store.put("x", b"")
        if store.can_append:
            store.append("x", [DATA], at=0)
        else:
            store.put("x", DATA)
        other = pickle.loads(pickle.dumps(store))
        assert other.read("x") == DATA
        store.close()
        other.put("y", b"2")
        assert store.read("y") == b"2"

    def test_append(self, store: Store) -> None:
        _needs_append(store)
        store.put("log", b"head")
        store.append("log", [b"one", b"", memoryview(b"two")], at=4)
        assert store.read("log") == b"headonetwo"
        assert store.size_bytes("log") == 10
        store.append("log", [b"3"], at=10)
        store.sync("log", start=4, end=11)
        assert store.read("log") == b"headonetwo3"

    def test_append_of_many_parts(self, store: Store) -> None:
        _needs_append(store)
        store.put("log", b"")
        parts: list[bytes | memoryview] = [b"%d," % number for number in range(5000)]
        store.append("log", parts, at=0)
        assert store.read("log") == b"".join(parts)

    def test_append_drops_what_is_beyond(self, store: Store) -> None:
        _needs_append(store)
        store.put("log", b"head")
        store.append("log", [b"a failed append"], at=4)
        store.append("log", [b"short"], at=4)
        assert store.read("log") == b"headshort"
        store.append("log", [], at=2)
        assert store.read("log") == b"he"

    def test_append_after_close_and_by_another(self, store: Store) -> None:
        _needs_append(store)
        store.put("log", b"")
        store.append("log", [b"1"], at=0)
        pickle.loads(pickle.dumps(store)).append("log", [b"2"], at=1)
        store.close()
        store.append("log", [b"3"], at=2)
        assert store.read("log") == b"123"

    def test_append_leaves_no_gap(self, store: Store) -> None:
        _needs_append(store)
        store.put("log", b"head")
        with pytest.raises(StorageError):
            store.append("log", [b"x"], at=5)
        assert store.read("log") == b"head"

    def test_append_to_a_missing_object(self, store: Store) -> None:
        _needs_append(store)
        for operation in (partial(store.append, "log", [b"x"], at=0), partial(store.sync, "log", start=0, end=1)):
            with pytest.raises(StorageError) as raised:
                operation()
            assert raised.value.kind == ErrorKind.OBJECT_MISSING
        store.put("log", b"")
        store.append("log", [b"x"], at=0)
        store.delete(["log"])
        with pytest.raises(StorageError) as raised:
            store.append("log", [b"y"], at=1)
        assert raised.value.kind == ErrorKind.OBJECT_MISSING
        assert store.list() == []


def _needs_append(store: Store) -> None:
    if not store.can_append:
        pytest.skip("the store cannot append")
