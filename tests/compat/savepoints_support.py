"""What the tests of :mod:`tests.compat.test_savepoints` and others share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import statelog
from statelog.log.open import open_location
from statelog.options import Options, Tuning
from statelog.queries.load import RestoreTarget, restore_operators
from statelog.reading.rows import one_by_one
from statelog.reading.savepoint import Manifest
from statelog.testing.keyed import KeyedQuery
from statelog.testing.query import ManualClock
from statelog.testing.rows import OperatorArguments
from statelog.testing.unkeyed import UnkeyedQuery
from tests.compat.fixtures_support import SCRIPT, fixture_hash
from tests.model.engine import command_query
from tests.query_runner import QueryRunner

FIXTURES = Path(__file__).parent / "savepoints"


BATCH = len(SCRIPT) - 1


WORDS = ["a", "b", "c", "d", "e", "f"]


OPTIONS = Options(file_merging="across", tuning=Tuning(merge_fan_in=2, orphan_min_age_s=0))


class Collect(statelog.OperatorProcessor):
    """Keeps every word, in a list and in a union list, and how often in a broadcast state."""

    def init(self, handle: statelog.OperatorHandle) -> None:
        self._words = handle.getListState("words", "word string")
        self._union = handle.getUnionListState("union", "word string")
        self._rules = handle.getBroadcastState("rules", "name string", "n long")

    def processBroadcast(self, rows: Iterator[Any], context: statelog.OperatorContext) -> None:
        for row in rows:
            self._rules.put((row.name,), (row.n,))

    def process(self, rows: Iterator[Any], context: statelog.OperatorContext) -> Iterator[Any]:
        for row in rows:
            self._words.add((row.word,))
            self._union.add((row.word,))
        rules = {name: n for (name,), (n,) in self._rules.items()}
        yield (json.dumps([[word for (word,) in self._words.get()], [word for (word,) in self._union.get()], rules]),)

    def close(self) -> None:
        pass


def restored(target: Path, directory: Path) -> Manifest:
    """Restore all operators of a savepoint for a query named ``query``."""
    manifest = Manifest.read(open_location(str(target)), str(target))
    where = RestoreTarget(
        str(directory / "location"), "query", "restore", manifest.batch, Options(), ManualClock(), lambda: b"t" * 16
    )
    restore_operators(manifest.operators, str(target), where, one_by_one)
    return manifest


def keyed() -> KeyedQuery:
    return command_query("op", fixture_hash, OPTIONS)


def collecting() -> UnkeyedQuery:
    arguments = OperatorArguments(
        input="word string", output="json string", broadcast="name string, n long", uid="words"
    )
    return UnkeyedQuery(Collect(), arguments, OPTIONS)


def runner(directory: Path) -> QueryRunner:
    """A query of both operators."""
    return QueryRunner(directory, OPTIONS, open_store=open_location)
