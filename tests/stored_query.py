"""A query of several operators as Spark and statelog leave it when it stops, made without Spark.

Every operator has one key, ``(1, None)``, whose value is the number of the last batch, and whose list has all batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from statelog.checkpoint.batch import BatchTime
from statelog.log.entry import QueryOperators
from statelog.log.open import open_location
from statelog.storage.names import name_part
from statelog.testing.arguments import OperatorArguments
from statelog.testing.keyed import KeyedQuery
from tests.model.engine import Engine

KEY = (1, None)


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


class _Operator(Engine):
    def __init__(
        self, scratch: Path, location: Path, uid: str, operators: QueryOperators | None, states: Sequence[str]
    ) -> None:
        super().__init__(scratch, lambda key: 0, open_store=open_location)
        self._location = location
        if states:
            arguments = OperatorArguments(
                input="a long, b string, command string",
                keys=["a", "b"],
                output="json string",
                keyHash=lambda key: 0,
                uid=uid,
            )
            self.keyed = KeyedQuery(NamedStates(uid, states), arguments, self.options)
        self.operator = replace(self.keyed.operator, uid=uid, operators=operators)

    @property
    def location(self) -> str:
        return str(self._location)


class StoredQuery:
    """A query with a checkpointLocation.

    Parameters
    ----------
    root : Path
        Holds everything.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoint = root / "checkpoint"
        self.runs = 0
        self.times: dict[int, BatchTime] = {}

    def run(
        self,
        operators: Mapping[str, Path | None],
        batches: range,
        *,
        notes: bool = True,
        lacking: Sequence[str] = (),
        started_ms: int | None = None,
        time_ms: int = 1000,
        states: Sequence[str] = (),
    ) -> StoredQuery:
        """Run some batches.

        Parameters
        ----------
        operators : mapping of str to (Path or None)
            The operators, and their own locations.
        batches : range
            The batches.
        notes : bool
            Whether checkpoints note the operators; older ones do not.
        lacking : sequence of str
            Operators that do not come to the checkpoint of the last batch, although Spark commits it.
        started_ms : int, optional
            What the driver's clock says at the start; by default later than at the last one.
        time_ms : int
            Spark's time of batch 0; every batch is a millisecond later.
        states : sequence of str
            Names of value states that every operator has instead, see :class:`NamedStates`.
        """
        self.runs += 1
        places = {uid: "" if own is None else str(own) for uid, own in operators.items()}
        note = QueryOperators(self.runs if started_ms is None else started_ms, places) if notes else None
        for uid, own in operators.items():
            location = own or self.checkpoint / "statelog"
            engine = _Operator(self.root / f"scratch-{self.runs}-{name_part(uid)}", location, uid, note, states)
            later = {batch: BatchTime(time_ms + batch, 0) for batch in range(batches.start, 100)}
            engine.times = {**self.times, **later}
            engine.start(1, batches.start)
            for batch in batches[:-1] if uid in lacking else batches:
                engine.run_commands(batch, 0, [(KEY, ("set", batch)), (KEY, ("append", str(batch)))])
            engine.coordinator.close()
            engine.release()
        for batch in batches:
            self.times[batch] = BatchTime(time_ms + batch, 0)
            text = "v1\n" + json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": time_ms + batch}) + '\n{"value":0}'
            _write(self.checkpoint / "offsets" / str(batch), text)
            _write(self.checkpoint / "commits" / str(batch), "v1\n{}")
        _write(self.checkpoint / "metadata", '{"id":"query"}')
        return self

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
