"""A query of several operators as Spark and statelog leave it when it stops, made without Spark.

Every operator has one key, ``(1, None)``, whose value is the number of the last batch, and whose list has all batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from statelog import Options, Tuning
from statelog.coordinator.batch import BatchTime
from statelog.log.open import open_location
from tests.model.engine import Command, Key, command_query, command_rows
from tests.query_runner import QueryRunner

KEY: Key = (1, None)
OPTIONS = Options(file_merging="across", tuning=Tuning(merge_fan_in=2, orphan_min_age_s=0))


class NamedStates:
    """Keeps in each of some value states the operator's name and its own."""

    def __init__(self, uid: str, names: Sequence[str]) -> None:
        self._uid = uid
        self._names = names

    def init(self, handle: Any) -> None:
        self._states = {name: handle.getValueState(name, "field string") for name in self._names}

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for name, state in self._states.items():
            state.update((f"{self._uid} {name}",))
        yield from ()

    def close(self) -> None:
        pass


class StoredQuery:
    """A query with a checkpointLocation.

    Parameters
    ----------
    root : Path
        Holds everything.
    location : Path, optional
        Of the state, if it is not in the checkpointLocation.
    query_id : str
        Spark's id of the query.
    """

    def __init__(self, root: Path, location: Path | None = None, query_id: str = "query") -> None:
        self.root = root
        self.checkpoint = root / "checkpoint"
        self.location = str(location or self.checkpoint / "statelog")
        self.query_id = query_id
        self.runs = 0
        self.times: dict[int, BatchTime] = {}

    def run(
        self,
        operators: Iterable[str],
        batches: range,
        *,
        lacks_last: bool = False,
        time_ms: int = 1000,
        states: Sequence[str] = (),
    ) -> StoredQuery:
        """Run some batches.

        Parameters
        ----------
        operators : iterable of str
            The operators.
        batches : range
            The batches.
        lacks_last : bool
            Whether the last batch has no checkpoint, although Spark commits it: an operator's subtasks did not end.
        time_ms : int
            Spark's time of batch 0; every batch is a millisecond later.
        states : sequence of str
            Names of value states that every operator has instead, see :class:`NamedStates`.
        """
        self.runs += 1
        scratch, uids = self.root / f"scratch-{self.runs}", list(operators)
        runner = QueryRunner(scratch, OPTIONS, location=self.location, query_id=self.query_id, open_store=open_location)
        runner.runs = self.runs  # the ids of runs, tokens and files of two starts differ
        runner.times = {**self.times, **{batch: BatchTime(time_ms + batch, 0) for batch in range(batches.start, 100)}}
        queries = {
            uid: command_query(uid, lambda key: 0, OPTIONS, NamedStates(uid, states) if states else None)
            for uid in uids
        }
        runner.start([queries[uid].operator for uid in uids], 1, batches.start)
        for batch in batches:
            for uid in uids[:-1] if lacks_last and batch == batches[-1] else uids:
                commands: list[tuple[Key, Command]] = [(KEY, ("set", batch)), (KEY, ("append", str(batch)))]
                runner.run_operator(uid, batch, command_rows(queries[uid], commands))
        runner.stop()
        self.commit(batches, time_ms=time_ms)
        return self

    def commit(self, batches: range, *, time_ms: int = 1000) -> None:
        """Write what Spark notes of batches, whatever operators they have had."""
        for batch in batches:
            self.offer(batch, time_ms=time_ms)
            _write(self.checkpoint / "commits" / str(batch), "v1\n{}")
        _write(self.checkpoint / "metadata", json.dumps({"id": self.query_id}))

    def offer(self, batch: int, *, time_ms: int = 1000) -> None:
        """Write what Spark notes of a batch that it begins."""
        self.times[batch] = BatchTime(time_ms + batch, 0)
        text = "v1\n" + json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": time_ms + batch}) + '\n{"value":0}'
        _write(self.checkpoint / "offsets" / str(batch), text)

    def forget(self, batches: range) -> None:
        """Take back Spark's commits, and what it noted of the batches behind the first of them."""
        for batch in batches:
            (self.checkpoint / "commits" / str(batch)).unlink()
        for batch in batches[1:]:
            (self.checkpoint / "offsets" / str(batch)).unlink()


def saved_values(target: Path) -> dict[str, Any]:
    """For each operator of a savepoint, by uid, the value of its key."""
    manifest = json.loads((target / "manifest.json").read_bytes())
    found: dict[str, Any] = {}
    for operator in manifest["operators"]:
        [[file]] = [state["files"] for state in operator["states"] if state["schema"]["name"] == "value"]
        [found[operator["uid"]]] = pq.read_table(target / file["name"]).column("value_field").to_pylist()
    return found


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
