"""Processors that try values: the same ones on both engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from tests.conversions.cases import show, value

STATES = ("value", "list", "map key", "bare value", "bare map key")
"""Ways into a state; the bare ones are without the tuple that a row is."""


class StateProbe(StatefulProcessor):
    """Puts values into states of a type and reads them again; the rows say "way|value".

    Parameters
    ----------
    kind : str
        Type of the states' field.
    log : str
        The file to which what happens is added: a line when a value is tried, and one with the result.
    """

    def __init__(self, kind: str, log: str) -> None:
        self._kind, self._log = kind, log

    def init(self, handle: Any) -> None:
        schema = f"f {self._kind}"
        self._value = handle.getValueState("value", schema)
        self._list = handle.getListState("list", schema)
        self._map = handle.getMapState("map", schema, "number long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            note(self._log, f"? {row.text}")
            way, _, text = row.text.partition("|")
            try:
                result = show(self._tried(way, value(text)))
            except Exception:
                self._value.exists()  # fails if the connection to Spark's state did not survive: then the query ends
                result = "error"
            note(self._log, f"= {result}")
        yield from ()

    def close(self) -> None:
        pass

    def _tried(self, way: str, given: Any) -> Any:
        row = given if way.startswith("bare") else (given,)
        if way.endswith("value"):
            self._value.clear()
            self._value.update(row)
            return self._value.get()[0]
        if way == "list":
            self._list.clear()
            self._list.appendValue(row)
            return next(self._list.get())[0]
        self._map.clear()
        self._map.updateValue(row, (1,))
        return next(self._map.keys())[0]


class InputProbe(StatefulProcessor):
    """Shows what it gets in the column ``f`` of rows, or as its key."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(seen=f"{row.text}\t{shown(row.f)}\t{shown(key[0])}")

    def close(self) -> None:
        pass


class FrameInputProbe(InputProbe):
    """Shows what it gets in the column ``f`` of frames, with the column's type, or as its key."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            kind = frame["f"].dtype
            seen = [
                f"{text}\t{shown(item)} in {kind}\t{shown(key[0])}"
                for text, item in zip(frame["text"], frame["f"], strict=True)
            ]
            yield pd.DataFrame({"seen": seen})


class WholeNumbersProbe(InputProbe):
    """Shows the column ``n`` of each frame."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            yield pd.DataFrame({"seen": [f"{key[0]}: {frame['n'].dtype} {frame['n'].tolist()}"]})


def shown(item: Any) -> str:
    """A value as text, with its class."""
    kind = type(item)
    return f"{'' if kind.__module__ == 'builtins' else kind.__module__ + '.'}{kind.__name__} {show(item)}"


class OutputProbe(StatefulProcessor):
    """Returns a row for every value.

    Parameters
    ----------
    log : str
        The file to which each value's text is added before it is returned.
    """

    def __init__(self, log: str) -> None:
        self._log = log

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for row in rows:
            note(self._log, f"? {row.text}")
            yield self.output(row.text, value(row.text))

    def output(self, text: str, given: Any) -> Any:
        """A row."""
        return Row(text=text, f=given)

    def close(self) -> None:
        pass


class FrameProbe(OutputProbe):
    """Returns a frame for every value."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        yield from super().handleInputRows(key, (row for frame in rows for row in frame.itertuples()), timerValues)

    def output(self, text: str, given: Any) -> Any:
        """A frame with one row."""
        return frame_of(text, given)


def frame_of(text: str, given: Any) -> pd.DataFrame:
    """A frame with one row: of the type that pandas gives a value, or of objects."""
    is_scalar = not isinstance(given, (pd.DataFrame, pd.Series)) and bool(pd.api.types.is_scalar(given))
    column = pd.Series([given]) if is_scalar else pd.Series([given], dtype=object)
    return pd.DataFrame({"text": [text], "f": column})


def note(log: str, line: str) -> None:
    """Add a line to a log."""
    with Path(log).open("a") as file:
        file.write(line + "\n")
