"""What the tests of :mod:`tests.queries.test_rewind` and others share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from statelog.history.query_history import QueryHistory, read_history
from statelog.options import Options, Tuning
from statelog.storage import LocalStore
from tests.model.engine import Command, command_query, command_rows
from tests.query_runner import QueryRunner


def text_of(folder: str, batch: int) -> str:
    """What Spark writes of a batch, as far as it counts here; times are those of :class:`Engine`."""
    return f"v1\n{json.dumps({'batchTimestampMs': 1000 + batch, 'of': folder})}\n"


def spark_checkpoint(root: Path, offsets: range, commits: range, query_id: str = "query") -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / "metadata").write_text(json.dumps({"id": query_id}))
    for folder, batches in (("offsets", offsets), ("commits", commits)):
        (root / folder).mkdir(parents=True)
        for batch in batches:
            (root / folder / str(batch)).write_text(text_of(folder, batch))
            (root / folder / f".{batch}.crc").write_text(f"crc of {folder} {batch}")


def spark_files(root: Path) -> dict[str, str]:
    """Spark's files that a query would read, and what is in them."""
    files = [path for folder in ("offsets", "commits") for path in (root / folder).glob("*")]
    return {str(path.relative_to(root)): path.read_text() for path in files}


def expected_files(offsets: range, commits: range) -> dict[str, str]:
    return {
        name: text
        for folder, batches in (("offsets", offsets), ("commits", commits))
        for batch in batches
        for name, text in (
            (f"{folder}/{batch}", text_of(folder, batch)),
            (f"{folder}/.{batch}.crc", f"crc of {folder} {batch}"),
        )
    }


SMALL: dict[str, Any] = {
    "file_merging": "across",
    "retained_checkpoints": 2,
    "materialization_interval_s": 0,
    "merge_fan_in": 2,
    "orphan_min_age_s": 0,
    "log_min_age_s": 0,
}


class Operators:
    """A query whose checkpoints are at a location, apart from Spark's files; an operator's value is the last batch.

    Parameters
    ----------
    directory : Path
        Holds the location.
    options : Options
        Of the query.
    """

    def __init__(self, directory: Path, options: Options | None = None) -> None:
        self.options = options or Options(file_merging="across", tuning=Tuning(orphan_min_age_s=0))
        self.runner = QueryRunner(directory / "scratch", self.options, location=str(directory / "location"))

    @property
    def location(self) -> str:
        return self.runner.location

    def start(self, uids: str, first: int) -> None:
        """Start the query on new hosts; each character of `uids` is an operator."""
        operators = [command_query(uid, lambda key: 0, self.options).operator for uid in uids]
        self.runner.start(operators, 1, first, keep_local=False)

    def run(self, uids: str, first: int, last: int, *, lacks_last: bool = False) -> None:
        """Run some batches in a new start; the last operator may not come to the end of the last batch."""
        self.start(uids, first)
        for batch in range(first, last + 1):
            for uid in uids[:-1] if lacks_last and batch == last else uids:
                self.set(uid, batch)
        self.runner.stop()

    def set(self, uid: str, batch: int) -> None:
        """Run a batch of an operator."""
        self._run(uid, batch, ("set", batch))

    def value(self, uid: str, batch: int) -> Any:
        """The value of an operator before a batch of the present start."""
        [output] = self._run(uid, batch, ("read",))
        [text] = output.column(0).to_pylist()
        [_, [value, *_]] = json.loads(text)
        return None if value is None else value[0]

    def _run(self, uid: str, batch: int, command: Command) -> list[pa.RecordBatch]:
        keyed = command_query(uid, lambda key: 0, self.options)
        return self.runner.run_operator(uid, batch, command_rows(keyed, [((1, None), command)]))

    @property
    def history(self) -> QueryHistory:
        """The checkpoints, as another process reads them."""
        return read_history(LocalStore(self.location))

    def objects(self, uid: str, pattern: str) -> list[Path]:
        """Files of an operator that the query has."""
        return sorted((Path(self.location) / self.history.names[uid]).glob(pattern))


class Killed(BaseException):
    """The process dies."""


@dataclass
class Kill:
    """A death at one of the changes that a process makes, before or after its effect."""

    at: int
    is_after: bool
    changes: int = 0

    def around(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """A function that changes something, and in which the process may die."""

        def run(*arguments: Any, **named: Any) -> Any:
            self.changes += 1
            if self.changes == self.at and not self.is_after:
                raise Killed
            result = change(*arguments, **named)
            if self.changes == self.at:
                raise Killed
            return result

        return run


CHANGES = [(LocalStore, "put_if_absent"), (LocalStore, "append"), (LocalStore, "delete"), (Path, "rename")]
