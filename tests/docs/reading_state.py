"""What docs/reading-state.md reads: a query ``clicks``, another one with the same state, and a savepoint."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from statelog.testing import Harness
from statelog.testing.harness import parts_of
from tests.reading.saved import save

BATCHES = 14
USERS = ["ann", "bob", "cay"]


class Seen:
    """Counts the clicks of each user."""

    def init(self, handle: Any) -> None:
        self._seen = handle.getValueState("seen", "clicks long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        clicks = self._seen.get()
        self._seen.update(((clicks[0] if clicks else 0) + len(list(rows)),))
        yield from ()

    def close(self) -> None:
        pass


class Prepared:
    """Everything below a directory, and the names that the examples need."""

    def __init__(self, data: Path) -> None:
        self._upserted: list[tuple[str, int]] = []
        self.names = {"upsert": self._upsert}
        with Harness(Seen(), input="user string", keys=["user"], output="user string", parallelism=2) as harness:
            for _ in range(BATCHES):
                harness.push([(user,) for user in USERS])
            location = parts_of(harness).query.location
            for name in ("clicks", "clicks-2"):
                shutil.copytree(location, data / "checkpoints" / name / "statelog")
            save(location, data / "savepoints" / "monday", BATCHES - 1)

    def _upsert(self, changes: DataFrame, number: int) -> None:
        self._upserted += [(row.key_user, row.value_clicks) for row in changes.collect()]

    def check(self, names: dict[str, Any]) -> None:
        """Whether the examples have read what is there; `names` are theirs. Ends the stream that they have begun."""
        [stream] = names["spark"].streams.active
        stream.processAllAvailable()
        stream.stop()
        state = {(user, BATCHES) for user in USERS}
        assert {tuple(row.values()) for row in names["rows"].to_pylist()} == state, "the rows of the savepoint"
        assert names["found"].to_pylist() == [{"key_user": "ann", "value_clicks": BATCHES}]
        assert {tuple(row) for row in names["counts"].collect()} == state
        # The changes of the newest batch come with the next one.
        assert sorted(self._upserted) == [(user, count) for user in USERS for count in range(1, BATCHES)]
        assert names["one"].is_equal
