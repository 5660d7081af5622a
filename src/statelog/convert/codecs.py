"""Forms of processors: what they are given rows as, and what they return."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol, Self

from pyspark.sql.types import StructType

from statelog.convert.input import FrameInput, RowInput
from statelog.convert.output import FrameOutput, RowOutput
from statelog.convert.times import TimeMode
from statelog.log.entry import Settings
from statelog.operators.keyed.operator import InputCodec, OutputCodec

_BATCH_WATERMARK_MS: Final = -1
"""What Spark's batch queries give as watermark."""
_NO_LIMIT_BYTES: Final = (1 << 31) - 1


class ProcessorCodecs(Protocol):
    """How a kind of processors is given rows, and returns them; picklable."""

    @property
    def drops_late(self) -> bool:
        """Whether late rows are left out before the processor sees them."""
        ...

    @property
    def batch_watermark_ms(self) -> int:
        """The watermark of a batch query, milliseconds."""
        ...

    @property
    def settings(self) -> Settings:
        """What the state of such a processor depends on."""
        ...

    def input(self, columns: list[str]) -> InputCodec:
        """The codec of input rows with these columns."""
        ...

    def output(self, schema: StructType, zone: str, uid: str) -> OutputCodec:
        """The codec of an operator's output rows of a schema; times without a zone are in the session's."""
        ...


@dataclass(frozen=True)
class RowCodecs:
    """Spark's ``Row`` objects, as ``transformWithState`` gives and takes them."""

    drops_late: ClassVar[bool] = True
    batch_watermark_ms: ClassVar[int] = _BATCH_WATERMARK_MS
    settings: ClassVar[Settings] = {}

    def input(self, columns: list[str]) -> RowInput:
        """Rows."""
        return RowInput(columns)

    def output(self, schema: StructType, zone: str, uid: str) -> RowOutput:
        """Rows; times without a zone are in the process's, as in Spark."""
        return RowOutput(schema, uid)


@dataclass(frozen=True)
class FrameCodecs:
    """Pandas frames, as ``transformWithStateInPandas`` gives and takes them.

    Parameters
    ----------
    max_rows : int
        Rows per frame; 0 or less is no limit.
    max_bytes : int
        Bytes per frame, about.
    keeps_integers : bool
        Whether whole numbers keep their width, and stay whole beside nulls.
    """

    max_rows: int = 10_000
    max_bytes: int = _NO_LIMIT_BYTES
    keeps_integers: bool = False

    drops_late: ClassVar[bool] = True
    batch_watermark_ms: ClassVar[int] = _BATCH_WATERMARK_MS
    settings: ClassVar[Settings] = {}

    @classmethod
    def of(cls, setting: Callable[[str, str], object]) -> Self:
        """Frames as a session's settings want them; `setting` gives a setting's value, or the default given with it."""
        rows = setting("spark.sql.execution.arrow.maxRecordsPerBatch", str(cls.max_rows))
        size = setting("spark.sql.execution.arrow.maxBytesPerBatch", str(_NO_LIMIT_BYTES))
        keeps = setting("spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype", "false")
        return cls(int(str(rows)), _bytes(str(size)), str(keeps).lower() == "true")

    def input(self, columns: list[str]) -> FrameInput:
        """Frames."""
        return FrameInput(columns, self.max_rows, self.max_bytes, keeps_integers=self.keeps_integers)

    def output(self, schema: StructType, zone: str, uid: str) -> FrameOutput:
        """Frames."""
        return FrameOutput(schema, zone, uid)


def recorded_settings(mode: TimeMode, form: ProcessorCodecs) -> Settings:
    """What the state of a keyed operator depends on beside its schemas."""
    return {"timeMode": str(mode), "windows": "none", **form.settings}


def _bytes(text: str) -> int:
    """A size of Spark's configuration, such as 64MB, in bytes."""
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if found is None:
        return _NO_LIMIT_BYTES
    return int(found[1]) << (10 * "bkmgtp".find((found[2] or "b")[0]))
