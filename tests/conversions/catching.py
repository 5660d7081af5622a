"""Probes that note when Spark's conversion of an output fails and continue, which saves a query for each failure."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql.conversion import PandasToArrowConversion

from tests.conversions.probes import FrameProbe, OutputProbe, note


class CatchingRows(OutputProbe):
    """Returns rows; the worker that runs it notes their failures."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        _log[0] = self._log
        _catch_conversions()


class CatchingFrames(FrameProbe):
    """Returns frames; the worker that runs it notes their failures."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        _log[0] = self._log
        _catch_conversions()


_log = [""]


def _catch_conversions() -> None:
    """Wrap the two functions by which a Python worker of Spark converts outputs, once in each."""
    if pa.RecordBatch.__module__ == __name__:
        return
    from_frame = PandasToArrowConversion.__dict__["convert"].__func__
    batch = pa.RecordBatch

    def convert(cls: Any, /, data: Any, schema: Any, **options: Any) -> Any:
        try:
            return from_frame(cls, data, schema, **options)
        except Exception:
            note(_log[0], "= error")
            empty = [frame.assign(f=None, text="caught").iloc[:0] for frame in data]
            return from_frame(cls, empty, schema, **options)

    class Forwarding(type):
        def __getattr__(cls, name: str) -> Any:
            return getattr(batch, name)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, batch)

    class RecordBatch(metaclass=Forwarding):
        @staticmethod
        def from_pylist(rows: Any, schema: Any) -> Any:
            try:
                return batch.from_pylist(rows, schema=schema)
            except Exception:
                note(_log[0], "= error")
                return batch.from_pylist([], schema=schema)

    PandasToArrowConversion.convert = classmethod(convert)  # type: ignore[method-assign, assignment]  # in this worker
    pa.RecordBatch = RecordBatch
