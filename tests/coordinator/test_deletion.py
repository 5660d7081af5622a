"""Which objects may be deleted, and what happens when one of them cannot be."""

from __future__ import annotations

import ast
import logging
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from statelog import ConfigurationError, ErrorKind, StorageError
from statelog.coordinator.deletion import Deleter, DeletionGate
from statelog.coordinator.grants import Grants
from statelog.log.references import Base, Level, SegmentRef, StoredRun
from statelog.storage import LocalStore
from statelog.storage.store import ObjectInfo, StoreWrapper
from tests.contract.log_contract import make_checkpoint


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here crashes the machine, and syncing would take most of the time."""
    for target in ("os.fsync", "statelog.storage.local.sync_data"):
        monkeypatch.setattr(target, lambda fd: None)


SOURCES = Path(__file__).parents[2] / "src" / "statelog"


def gate(needed: set[str] | None = None, grants: Grants | None = None, pinned: Sequence[str] = ()) -> DeletionGate:
    made = DeletionGate(
        (needed or set()).__contains__,
        (grants or Grants(lambda subtask: f"op-1/runs/3/{subtask}")).is_open,
        set(pinned).__contains__,
    )
    made.begin(3, 7)
    return made


# ---- The gate ----


def test_a_file_that_a_checkpoint_needs_stays() -> None:
    needed = {"op-1/changes/1/0/2-a.run"}
    assert not gate(needed).may_go("op-1/changes/1/0/2-a.run")
    assert gate(needed).may_go("op-1/changes/1/0/3-a.run")


def test_a_file_that_a_pin_needs_stays() -> None:
    made = gate(pinned=["op-1/changes/1/0/2-a.run"])
    assert not made.may_go("op-1/changes/1/0/2-a.run")
    assert made.may_go("op-1/changes/1/0/3-a.run")


def test_what_an_entry_in_doubt_names_stays_until_another_is_durable() -> None:
    entry, _ = make_checkpoint("a", 3, 6)
    segment = SegmentRef(0, 1, b"", 0, 1, 1, 1, "op-1/changes/3/0/6-a.run")
    run = StoredRun("op-1/runs/3/0/5-1/5-a-0.run", 0, 1, b"", 1, 0, 9)
    base = Base(0, 1, [Level(0, 5, b"", b"", 0, 9, [run])])
    made = gate()
    assert made.may_go(segment.name)
    assert made.may_go(run.name)
    first, second = entry.sections
    made.doubt(replace(entry, sections=[first, replace(second, segments=[segment], bases=[base])]))
    made.doubt(replace(entry, sections=[first]))
    made.end()
    assert not made.may_go(segment.name)
    assert not made.may_go(run.name)
    made.settle("log/2")
    assert made.may_go(segment.name)
    assert made.may_go(run.name)


def test_what_an_attempt_may_still_ack_stays() -> None:
    made = gate()
    assert not made.may_go("op-1/changes/3/0/7-a-0.run")
    assert not made.may_go("op-1/changes/3/12/8-a.snapshot")
    assert made.may_go("op-1/changes/3/0/6-a-0.run"), "its batch is certain"
    assert made.may_go("op-1/changes/2/0/7-a-0.run"), "its run is over"
    made.end()
    assert made.may_go("op-1/changes/3/0/7-a-0.run")


def test_only_attempts_of_the_run_are_live() -> None:
    """And no other object is taken for one of theirs, whatever it is called."""
    made = DeletionGate(lambda name: False, lambda name: False, lambda name: False)
    assert made.may_go("3/changes/1/0/7-a-0.run"), "the run has not begun"
    made.begin(3, 7)
    names = ["3/initial/7-0.arrow", "3/changes/3/0/x-7.run", "3/changes/3/9", "3/changes/3", "3/changes/33/0/7-a-0.run"]
    assert [made.may_go(name) for name in names] == [True] * 5


def test_files_of_the_log_stay_from_its_start_on() -> None:
    made = gate({"log/00000000000000000003.log"})
    names = [f"log/{number:020}.log" for number in range(2, 7)]
    assert [made.may_go(name) for name in names] == [False] * 5, "before an entry says so none may go"
    made.settle(names[3])
    assert [made.may_go(name) for name in names] == [True, False, True, False, False]


def test_what_a_grant_lets_a_job_name_stays_until_the_grant_ends() -> None:
    grants = Grants(lambda subtask: f"op-1/runs/3/{subtask}")
    made = gate(grants=grants)
    name = "op-1/runs/3/1/4-20/3-a-0.run"
    assert made.may_go(name)
    grants.open(1, "4-20", b"base", [])
    assert not made.may_go(name)
    assert made.may_go("op-1/runs/3/1/4-2/3-a-0.run"), "a job that is over"
    assert made.may_go("op-1/runs/3/0/4-20/3-a-0.run"), "another subtask"
    grants.take(1)
    assert not made.may_go(name), "it is to be part of a checkpoint"
    assert grants.end_pending(1)
    assert made.may_go(name)
    assert grants.ended() == ["op-1/runs/3/1/4-20"]
    assert grants.ended() == []


def test_nothing_but_the_deleter_deletes_objects_of_checkpoints() -> None:
    """Whoever deletes past it would have to know what it knows."""
    own = {
        "coordinator/deletion.py": "the deleter",
        "log/numbered.py": "its only claim, when a run ends that wrote nothing",
        "tasks/changeset.py": "an attempt's own objects, before anybody knows their names",
        "history/pins.py": "its own pins",
        "coordinator/garbage.py": "a branch's own pin at its parent",
    }
    found = set()
    for folder in ("coordinator", "history", "tasks", "local", "log"):
        for path in sorted((SOURCES / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Attribute) and node.attr == "delete"):
                    continue
                if re.search("store|open_location", ast.unparse(node.value)):
                    found.add(f"{folder}/{path.name}")
    assert found == set(own)


# ---- Failures ----


class Undeletable(StoreWrapper):
    """Cannot delete some objects; counts how often it is asked."""

    def __init__(self, root: Path, names: set[str]) -> None:
        super().__init__(LocalStore(root))
        self.undeletable = names
        self.asked = 0

    def delete(self, names: list[str]) -> None:
        self.asked += 1
        if not self.undeletable.isdisjoint(names):
            raise StorageError("delete failed: it is locked.")
        super().delete(names)


def fill(store: Undeletable, count: int) -> list[str]:
    names = [f"op-1/changes/1/0/{number:03}-a.run" for number in range(count)]
    for name in names:
        store.put(name, b"x")
    return names


def test_one_object_that_cannot_be_deleted_keeps_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = {"op-1/changes/1/0/017-a.run", "op-1/changes/1/0/018-a.run"}
    store = Undeletable(tmp_path, bad)
    names = fill(store, 100)
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=False)
    with caplog.at_level(logging.WARNING):
        deleter.delete(names)
        deleter.delete(fill(store, 3))
    assert {info.name for info in store.list()} == bad
    assert deleter.deleted == 98 + 3
    assert len(caplog.records) == 2, "each is told once"
    before = store.asked
    deleter.delete([])
    assert store.asked == before + len(bad), "there is nothing else to ask for"
    store.undeletable = set()
    deleter.delete([])
    assert store.list() == []


ERRORS = [OSError("no answer"), KeyError("size"), ConfigurationError("no name of an object"), StorageError("locked")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", ["delete", "list", "may_go", "look"])
def test_no_error_ends_the_thread_or_makes_the_end_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: str, error: Exception
) -> None:
    bad = "op-1/changes/1/0/001-a.run"
    fails = [True]

    class Failing(Undeletable):
        def delete(self, names: list[str]) -> None:
            if step == "delete" and fails[0] and bad in names:
                raise error
            super().delete(names)

        def list(self, prefix: str = "") -> list[ObjectInfo]:
            if step == "list" and fails[0] and prefix == bad:
                raise error
            return super().list(prefix)

    def may_go(name: str) -> bool:
        if step == "may_go" and fails[0] and name == bad:
            raise error
        return True

    def look() -> list[str]:
        if step == "look" and fails[0]:
            raise error
        return []

    store = Failing(tmp_path, set())
    names = fill(store, 10)
    deleter = Deleter(store, "operator 'x'", may_go, in_background=True, look=look)
    with caplog.at_level(logging.WARNING):
        for name in names:
            deleter.delete_below(name) if step == "list" else deleter.delete([name])
        deleter.close()
        deleter.close()
        [warned] = caplog.records
        assert {info.name for info in LocalStore(tmp_path).list()} == (set(names) if step == "look" else {bad})
        assert step == "look" or bad in warned.getMessage()
        fails[0] = False
        deleter.close()
    assert LocalStore(tmp_path).list() == []
    assert len(caplog.records) == 1


def test_a_process_that_cannot_begin_a_thread_deletes_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = Undeletable(tmp_path, set())
    names = fill(store, 3)
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=True)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    deleter.delete(names)
    assert len(store.list()) == 3
    deleter.close()
    assert store.list() == []


def test_a_store_that_is_out_of_order_is_not_asked_for_every_object(tmp_path: Path) -> None:
    store = Undeletable(tmp_path, set())
    names = fill(store, 1000)
    store.undeletable = set(names)
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=False)
    deleter.delete(names)
    assert store.asked < 40
    assert len(store.list()) == 1000
    store.undeletable = set(names[:30])  # more than one round gives up on
    for _ in range(5):
        deleter.delete([])
    assert [info.name for info in store.list()] == names[:30]


def test_an_object_that_the_gate_holds_back_goes_later(tmp_path: Path) -> None:
    store = Undeletable(tmp_path, set())
    [first, second] = fill(store, 2)
    held = {first}
    deleter = Deleter(store, "operator 'x'", lambda name: name not in held, in_background=False)
    deleter.delete([first, second])
    assert [info.name for info in store.list()] == [first]
    held.clear()
    deleter.close()
    assert store.list() == []


def test_a_search_leaves_what_the_gate_keeps(tmp_path: Path) -> None:
    store = Undeletable(tmp_path, set())
    names = fill(store, 12)
    deleter = Deleter(store, "operator 'x'", lambda name: name != names[4], in_background=False)
    deleter.delete_below("op-1/changes/1/0/00")
    assert [info.name for info in store.list()] == [names[4], *names[10:]]


def test_a_thread_deletes_what_comes_while_it_works(tmp_path: Path) -> None:
    store = Undeletable(tmp_path, set())
    names = fill(store, 50)
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=True)
    for name in names:
        deleter.delete([name])
    deleter.close()
    assert store.list() == []
    assert deleter.deleted == 50


class Hanging(Undeletable):
    """Hangs in the first call that deletes or lists, until it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, set())
        self.hangs = threading.Event()
        self.released = threading.Event()

    def delete(self, names: list[str]) -> None:
        self._hang()
        super().delete(names)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self._hang()
        return super().list(prefix)

    def _hang(self) -> None:
        if not self.hangs.is_set():
            self.hangs.set()
            assert self.released.wait(20)


def test_a_store_that_hangs_keeps_no_run_from_ending(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Hanging(tmp_path)
    first, second = fill(store, 2)
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=True, close_timeout_s=0.05)
    deleter.delete([first])
    assert store.hangs.wait(20)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "statelog-delete"]
    deleter.delete([second])
    with caplog.at_level(logging.WARNING):
        deleter.close()
    assert store.asked == 0, "whoever closes it asks for nothing"
    assert "the store hangs" in caplog.text
    assert thread.daemon, "nor does it keep the process from ending"
    store.released.set()
    thread.join(20)
    assert LocalStore(tmp_path).list(second), "it goes with the next start"


def test_what_comes_while_the_thread_is_busy_goes_before_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Hanging(tmp_path)
    first, second = fill(store, 2)
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=True)
    deleter.delete([first])
    assert store.hangs.wait(20)
    deleter.delete([second])
    threading.Timer(0.05, store.released.set).start()
    with caplog.at_level(logging.WARNING):
        deleter.close()
    assert LocalStore(tmp_path).list() == []
    assert caplog.text == ""


def test_a_search_that_is_asked_for_during_another_is_made_as_well(tmp_path: Path) -> None:
    store = Hanging(tmp_path)
    names = fill(store, 12)
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=True)
    deleter.delete_below("op-1/changes/1/0/00")
    assert store.hangs.wait(20), "nothing else has to be deleted first"
    deleter.delete_below("op-1/changes/1/0/010")
    store.released.set()
    deleter.close()
    assert [info.name for info in LocalStore(tmp_path).list()] == [names[11]]


def test_a_thread_rests_while_what_is_left_may_not_go(tmp_path: Path) -> None:
    store = Undeletable(tmp_path, set())
    [name] = fill(store, 1)
    asked: list[str] = []
    is_again = threading.Event()

    def may_go(name: str) -> bool:
        asked.append(name)
        if len(asked) > 2:
            is_again.set()
        return False

    deleter = Deleter(store, "operator 'x'", may_go, in_background=True)
    deleter.delete([name])
    assert not is_again.wait(0.1)
    deleter.close()
    assert store.list(name)


def test_a_thread_deletes_whenever_there_is_something_and_ends_with_the_deleter(tmp_path: Path) -> None:
    class Told(Undeletable):
        done = threading.Event()

        def delete(self, names: list[str]) -> None:
            super().delete(names)
            self.done.set()

    store = Told(tmp_path, set())
    names = fill(store, 30)
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=True)
    before = set(threading.enumerate())
    actions: list[tuple[Callable[[], None], list[str]]] = [
        (lambda: deleter.delete(names[20:]), names[:20]),
        (lambda: deleter.delete(names[10:20]), names[:10]),
        (lambda: deleter.delete_below("op-1/changes/1/0/00"), []),
    ]
    for action, left in actions:
        store.done.clear()
        action()
        assert store.done.wait(20), "nobody has to close it first"
        assert [info.name for info in store.list()] == left
    [thread] = set(threading.enumerate()) - before
    deleter.close()
    assert not thread.is_alive()


def test_without_anything_to_delete_there_is_no_thread_and_no_call(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store, pins = Undeletable(tmp_path, set()), Pins()
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=True, look=pins.look)
    deleter.delete([])
    assert set(threading.enumerate()) == before
    deleter.close()
    assert store.asked == 0
    assert pins.looks == 0, "a list of pins costs a request"


def test_a_search_that_fails_is_made_again(tmp_path: Path) -> None:
    class Unlisted(Undeletable):
        is_failing = True

        def list(self, prefix: str = "") -> list[ObjectInfo]:
            if self.is_failing:
                raise StorageError("list failed: no answer.")
            return super().list(prefix)

    store = Unlisted(tmp_path, set())
    names = fill(store, 12)
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=False)
    deleter.delete_below("op-1/changes/1/0/00")
    deleter.delete_below("op-1/changes/1/0/010")
    deleter.delete([names[11]])
    store.is_failing = False
    assert [info.name for info in store.list()] == names[:11]
    deleter.delete([])
    assert store.list() == []


# ---- Rounds and pins ----


class Pins:
    """Stands for the pins; `meanwhile` is what happens while they are listed."""

    def __init__(self, expired: Sequence[str] = (), meanwhile: Callable[[], None] = lambda: None) -> None:
        self.expired, self.meanwhile = list(expired), meanwhile
        self.looks = 0
        self.seen = threading.Semaphore(0)

    def look(self) -> list[str]:
        self.looks += 1
        self.meanwhile()
        self.seen.release()
        return self.expired


def test_pins_are_listed_before_an_object_may_go_and_the_expired_ones_go(tmp_path: Path) -> None:
    store = Undeletable(tmp_path, set())
    pinned, free, expired = fill(store, 3)
    stands: set[str] = set()
    pins = Pins([expired], lambda: stands.add(pinned))
    deleter = Deleter(store, "operator 'x'", lambda name: name not in stands, in_background=False, look=pins.look)
    deleter.delete([pinned, free])
    assert [info.name for info in store.list()] == [pinned]
    assert pins.looks == 1, "one list is enough for all objects of a round"


def test_what_a_search_finds_and_is_given_up_after_the_pins_were_listed_stays(tmp_path: Path) -> None:
    """A pin may have been written between the list and that."""
    store = Undeletable(tmp_path, set())
    given_up = fill(store, 2)[0]
    needed = {given_up}
    pins = Pins(meanwhile=needed.clear)
    deleter = Deleter(store, "operator 'x'", lambda name: name not in needed, in_background=False, look=pins.look)
    deleter.delete_below("op-1/")
    assert [info.name for info in store.list()] == [given_up]


def test_expired_pins_go_even_if_nothing_else_is_to_be_deleted(tmp_path: Path) -> None:
    store = Undeletable(tmp_path, set())
    [expired] = fill(store, 1)
    pins = Pins([expired])
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=True, look=pins.look)
    deleter.look()
    assert pins.seen.acquire(timeout=20), "nobody has to close it first"
    deleter.close()
    assert store.list() == []
    assert pins.looks == 1, "and once is enough"


def test_while_pins_cannot_be_listed_nothing_goes_and_nothing_is_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Undeletable(tmp_path, set())
    names = fill(store, 24)
    left: list[Callable[[], None]] = []

    def fail() -> None:
        if left:
            left.pop()()  # it comes while the list is under way
            raise StorageError("list failed: no answer.")

    pins = Pins(meanwhile=fail)
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=True, look=pins.look)
    left += [lambda: deleter.delete([names[12]]), lambda: deleter.delete_below("op-1/changes/1/0/00")]
    with caplog.at_level(logging.WARNING):
        deleter.delete([names[11]])
        deleter.delete_below("op-1/changes/1/0/010")
        assert pins.seen.acquire(timeout=20), "what comes meanwhile lets it look again"
        deleter.close()
    assert caplog.text.count("nothing is deleted until the pins can be listed") == 1
    assert [info.name for info in store.list()] == names[13:]


def test_a_failed_list_of_pins_keeps_the_objects_in_order(tmp_path: Path) -> None:
    store, is_failing = Undeletable(tmp_path, set()), True
    names = fill(store, 3)
    order: list[str] = []

    def fail() -> None:
        if is_failing:
            raise StorageError("list failed: no answer.")

    def may_go(name: str) -> bool:
        order.append(name)
        return True

    deleter = Deleter(store, "operator 'x'", may_go, in_background=False, look=Pins(meanwhile=fail).look)
    deleter.delete(names[:2])
    deleter.delete(names[2:])
    assert (store.asked, order) == (0, [])
    is_failing = False
    deleter.delete([])
    assert order == names
    assert store.list() == []


def test_rounds_have_a_pause_between_them_which_the_end_cuts_short(tmp_path: Path) -> None:
    """Each costs a list of pins."""
    store, pins = Undeletable(tmp_path, set()), Pins()
    first, second = fill(store, 2)
    deleter = Deleter(store, "operator 'x'", lambda name: True, in_background=True, look=pins.look, pause_s=600)
    deleter.delete([first])
    assert pins.seen.acquire(timeout=20)
    deleter.delete([second])
    assert not pins.seen.acquire(timeout=0.1)
    deleter.close()
    assert pins.looks == 2
    assert store.list() == []


def test_pins_that_cannot_be_listed_are_told_once_per_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"x")
    kinds = [ErrorKind.STORE_BUSY, ErrorKind.STORE_BUSY, ErrorKind.STORE_FAILED, None, ErrorKind.STORE_FAILED, None]

    def look() -> list[str]:
        kind = kinds.pop(0)
        if kind is not None:
            raise StorageError("no", kind=kind)
        return []

    deleter = Deleter(store, "op", lambda name: name != "a", in_background=False, look=look)
    told: list[int] = []
    with caplog.at_level(logging.WARNING):
        while kinds:
            deleter.delete(["a"])
            told.append(len(caplog.records))
    assert told == [1, 1, 2, 2, 3, 3]
