"""What the tests of :mod:`tests.queries.test_list_orphans` and others share."""

from __future__ import annotations

import os
from pathlib import Path

import statelog
from statelog.history.footprint import Footprint
from statelog.history.pins import Branch, Pin, pin_name, write_pin
from statelog.log.entry import Entry, EntryPlace, Parent, QueryCheckpoint, Section, encode_frame
from statelog.log.references import SegmentRef
from statelog.storage import LocalStore
from statelog.testing.query import ManualClock
from tests.contract.log_contract import make_claim


class Stored:
    """A query whose log is in single files, put there one by one; every object was written at second 1000."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = LocalStore(directory)

    def put(self, name: str, data: bytes = b"x") -> None:
        self.store.put(name, data)
        os.utime(self.directory / name, (1000, 1000))

    def claim(self, number: int, epoch: int, run: str = "run") -> None:
        self.log_file(number, make_claim(run)(epoch))

    def log_file(self, number: int, *entries: Entry) -> None:
        """Put a file of the log."""
        parts = [part for entry in entries for part in encode_frame(entry, [])]
        self.put(f"log/{number:020}.log", b"".join(parts))

    def checkpoint(self, number: int, epoch: int, batch: int, log_start: int, *names: str, run: str = "run") -> None:
        """Put the file of a checkpoint that needs some objects."""
        self.log_file(number, self.entry(epoch, batch, log_start, *names, run=run))

    def entry(
        self, epoch: int, batch: int, log_start: int, *names: str, run: str = "run", parent: Parent | None = None
    ) -> QueryCheckpoint:
        """The entry of a checkpoint that needs some objects."""
        segments = [SegmentRef(subtask, 1, b"sum", 0, 1, 1, 1, name) for subtask, name in enumerate(names)]
        own = Section("op", "op", max(len(names), 1), segments, b"", [], element_counts=[[]] * max(len(names), 1))
        token = f"{epoch} {batch}".encode()
        return QueryCheckpoint(
            *(epoch, batch, 0, token, b"", "query", run, token, 0, 0, [own]), log_start=log_start, parent=parent
        )

    def pin(self, token: bytes, *names: str, lasts_s: float | None = 100.0, branch: str = "") -> str:
        """Put a pin of some objects; returns its name."""
        needed = Footprint(
            query_id="query",
            batch=0,
            token=b"",
            batch_time_ms=0,
            entries=[EntryPlace(1, 0)],
            operators=[],
            objects=sorted(names),
        )
        made = Pin.on(needed, Branch(branch) if branch else None, owner="test", lasts_s=lasts_s)
        name = pin_name(0, token)
        write_pin(self.store, name, made)
        os.utime(self.directory / name, (1000, 1000))
        return name

    def orphans(self, *, age_s: float = 60.0, min_age_s: float = 60.0) -> list[str]:
        """Those at a time when everything has an age."""
        clock = ManualClock(1000 + age_s)
        return [info.name for info in statelog.list_orphans(str(self.directory), min_age_s=min_age_s, clock=clock)]
