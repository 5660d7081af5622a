"""A driver that was superseded says so, instead of reporting what the new owner has deleted as damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from statelog import CorruptionError, ErrorKind, FencedError, StorageError
from statelog.storage import LocalStore
from statelog.storage.store import ObjectInfo, StoreWrapper
from tests.model.engine import Engine
from tests.model.operator_engine import OperatorEngine


@dataclass
class Driver:
    """A start of a query of one operator."""

    start: Callable[[int], None]
    run: Callable[[int], object]
    location: str
    forget: Callable[[], None]
    """Takes the local files away."""
    identity: Callable[[], str]


def keyed(root: Path) -> Driver:
    engine = Engine(root, lambda key: hash(key) % 2**64, inline_budget_bytes=0)

    def forget() -> None:
        shutil.rmtree(engine.local)
        engine.new_workers()

    return Driver(
        lambda batch: engine.start(1, batch),
        lambda batch: engine.run_commands(batch, 0, [((1, None), ("set", batch))]),
        engine.location,
        forget,
        lambda: engine.identity,
    )


def unkeyed(root: Path) -> Driver:
    engine = OperatorEngine(root, file_merging="off")
    return Driver(
        lambda batch: engine.start(1, batch),
        lambda batch: engine.run_subtask(batch, 0, [["add", "items", str(batch)]]),
        engine.location,
        lambda: shutil.rmtree(root / f"host-{engine.host}", ignore_errors=True),
        lambda: engine.identity,
    )


KINDS = [keyed, unkeyed]


def with_lost_changes(driver: Driver) -> None:
    """Lose the objects with the operator's state, locally and in the store."""
    for batch in range(3):
        driver.run(batch)
    driver.forget()
    shutil.rmtree(Path(driver.location) / driver.identity())


@pytest.mark.parametrize("make", KINDS)
def test_a_task_that_lacks_what_the_new_owner_deleted_is_fenced(tmp_path: Path, make: Callable[[Path], Driver]) -> None:
    older, newer = make(tmp_path), make(tmp_path)
    older.start(0)
    with_lost_changes(older)
    newer.start(3)
    for _ in range(2):
        with pytest.raises(FencedError, match=r"Run \S+ of query \S+ owns it") as caught:
            older.run(3)
        assert caught.value.kind is ErrorKind.NEWER_EPOCH


def test_a_task_whose_local_files_the_new_owner_removed_is_fenced(tmp_path: Path) -> None:
    older, newer = keyed(tmp_path), keyed(tmp_path)
    older.start(0)
    older.run(0)
    newer.start(1)
    newer.run(1)
    older.forget()
    (tmp_path / "host-0").write_bytes(b"no directory")
    with pytest.raises(FencedError):
        older.run(1)


@pytest.mark.parametrize("make", KINDS)
def test_what_is_lost_while_the_start_owns_the_location_is_damage(
    tmp_path: Path, make: Callable[[Path], Driver]
) -> None:
    driver = make(tmp_path)
    driver.start(0)
    with_lost_changes(driver)
    for _ in range(2):
        with pytest.raises(CorruptionError) as caught:
            driver.run(3)
        assert caught.value.kind is ErrorKind.OBJECT_MISSING


def test_damage_is_reported_if_the_owner_cannot_be_found_out(tmp_path: Path) -> None:
    is_down = [False]

    class NoLists(StoreWrapper):
        def list(self, prefix: str = "") -> list[ObjectInfo]:
            if is_down[0]:
                raise StorageError("list failed.")
            return super().list(prefix)

    engine = Engine(
        tmp_path,
        lambda key: hash(key) % 2**64,
        inline_budget_bytes=0,
        open_store=lambda location: NoLists(LocalStore(location)),
    )
    engine.start(1, 0)
    for batch in range(2):
        engine.run_commands(batch, 0, [((1, None), ("set", batch))])
    shutil.rmtree(engine.local)
    engine.new_workers()
    shutil.rmtree(Path(engine.location) / engine.identity)
    is_down[0] = True
    with pytest.raises(CorruptionError, match=r"newer start of the query has deleted it .*: list failed\.") as caught:
        engine.run_commands(2, 0, [((1, None), ("read",))])
    assert caught.value.kind is ErrorKind.OBJECT_MISSING
