"""The output of window operators as columns: results, with some values in stored form, and late rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructField, StructType

from statelog.convert.output import RowOutput
from statelog.convert.types import arrow_type
from statelog.windows.aggregates import stored_type
from statelog.windows.processor import LateRow
from statelog.windows.stored import to_given


class WindowOutput:
    """Converts results and late rows to one batch of columns.

    `kept` names the columns whose values come in stored form; with `returns_late` the last column has the late rows.
    """

    def __init__(self, schema: StructType, kept: list[int], *, returns_late: bool, uid: str) -> None:
        fields = schema.fields[:-1] if returns_late else schema.fields
        self._kept = kept
        self._types = [arrow_type(field.dataType, f"output column '{field.name}'") for field in fields]
        self._results = RowOutput(
            StructType(
                [
                    StructField(field.name, stored_type(field.dataType) if index in kept else field.dataType)
                    for index, field in enumerate(fields)
                ]
            ),
            uid,
        )
        self._late = RowOutput(StructType(schema.fields[-1:]), uid) if returns_late else None
        self.hold = None if self._results.hold is None else self._held
        self.schema = pa.schema(
            [(field.name, arrow_type(field.dataType, f"output column '{field.name}'")) for field in schema]
        )

    def _held(self, row: Any) -> Any:
        """Hold a result; late rows need no copy, as nobody changes input rows."""
        return row if type(row) is LateRow or self._results.hold is None else self._results.hold(row)

    def encode(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> pa.RecordBatch:
        if self._late is None:
            return pa.RecordBatch.from_arrays(self._result_columns(rows, owner_of), schema=self.schema)
        late = [index for index, row in enumerate(rows) if type(row) is LateRow]
        results = rows if not late else [row for row in rows if type(row) is not LateRow]
        columns = self._result_columns(results, owner_of)
        late_rows = self._late.encode([(rows[index].row,) for index in late], owner_of).column(0)
        return pa.RecordBatch.from_arrays(
            [
                *[pa.concat_arrays([column, pa.nulls(len(late), column.type)]) for column in columns],
                pa.concat_arrays([pa.nulls(len(results), late_rows.type), late_rows]),
            ],
            schema=self.schema,
        )

    def _result_columns(self, rows: Sequence[Any], owner_of: Callable[[int], str]) -> list[pa.Array]:
        columns: list[pa.Array] = self._results.encode(rows, owner_of).columns
        for index in self._kept:
            columns[index] = to_given(columns[index], self._types[index])
        return columns
