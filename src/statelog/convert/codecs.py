"""The codecs for each kind of processor: how it gets rows, and how it returns them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

from pyspark.sql.streaming.stateful_processor import TimerValues
from pyspark.sql.types import StructType

from statelog.convert.arrow import ArrowCalls
from statelog.convert.input import FrameInput, RowInput
from statelog.convert.output import FrameOutput, RowOutput
from statelog.convert.times import TimeMode
from statelog.log.entry import Settings
from statelog.operators.keyed.operator import InputCodec, OutputCodec
from statelog.runs.keys import KeyCodec
from statelog.runs.schema import StateDescriptor
from statelog.runs.times import Moment

_NO_LIMIT_BYTES: Final = (1 << 31) - 1
_END_OF_TIME_MS: Final = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class ProcessorCalls:
    """The parts of an operator that calls of its processor need."""

    columns: list[str]
    """The input columns."""
    key_columns: list[int]
    key_codec: KeyCodec
    output: StructType
    states: Mapping[str, StateDescriptor]
    """By declared name."""
    times: Callable[[Moment], TimerValues]


@dataclass(frozen=True, kw_only=True)
class ProcessorCodecs(ABC):
    """Makes the codecs for one kind of processor; picklable."""

    settings: Settings = field(default_factory=dict)
    """The settings, by name, that the state of such a processor depends on."""
    needs_heartbeat: str = ""
    """The reason why the query must have a heartbeat, for messages; empty if there is none."""

    takes_columns: ClassVar[bool] = False
    """Whether the processor is called with the columns of many keys."""
    drops_late: bool = True
    """Whether late rows are dropped before the processor sees them."""
    batch_watermark_ms: ClassVar[int] = -1
    """The watermark of a batch query, milliseconds; this is Spark's."""

    def adapted(self, processor: Any, calls: ProcessorCalls) -> Any:
        """The processor as a subtask calls it."""
        return processor

    @abstractmethod
    def input(self, columns: list[str]) -> InputCodec | None:
        """The codec of input rows with these column names; None if the processor takes columns."""

    @abstractmethod
    def output(self, schema: StructType, zone: str, uid: str) -> OutputCodec:
        """The codec of output rows; `zone` is the session's, for times without a zone, and `uid` names the operator."""


class RowCodecs(ProcessorCodecs):
    """Spark's ``Row`` objects, as ``transformWithState`` gives and takes them.

    Output times without a zone are local times of the process, as in Spark, not of the session.
    """

    def input(self, columns: list[str]) -> RowInput:
        return RowInput(columns)

    def output(self, schema: StructType, zone: str, uid: str) -> RowOutput:
        return RowOutput(schema, uid)


@dataclass(frozen=True)
class FrameCodecs(ProcessorCodecs):
    """Pandas frames, as ``transformWithStateInPandas`` gives and takes them."""

    max_rows: int = 10_000
    """Rows per frame; 0 or less is no limit."""
    max_bytes: int = _NO_LIMIT_BYTES
    """Approximate bytes per frame."""
    keeps_integers: bool = False
    """Whether integers keep their width, and stay integers next to nulls."""

    @classmethod
    def of(cls, setting: Callable[[str, str], object]) -> Self:
        """The codecs for a session's settings; `setting` returns the value of a name, or the default given with it."""
        rows = setting("spark.sql.execution.arrow.maxRecordsPerBatch", str(cls.max_rows))
        size = setting("spark.sql.execution.arrow.maxBytesPerBatch", str(_NO_LIMIT_BYTES))
        keeps = setting("spark.sql.execution.pythonUDF.pandas.preferIntExtensionDtype", "false")
        return cls(int(str(rows)), _bytes(str(size)), str(keeps).lower() == "true")

    def input(self, columns: list[str]) -> FrameInput:
        return FrameInput(columns, self.max_rows, self.max_bytes, keeps_integers=self.keeps_integers)

    def output(self, schema: StructType, zone: str, uid: str) -> FrameOutput:
        return FrameOutput(schema, zone, uid)


@dataclass(frozen=True)
class ColumnCodecs(ProcessorCodecs):
    """Arrow columns, for processors that take the rows of many keys at once."""

    completes_in_batch: bool = False
    """Whether a batch query, which has all its rows, completes everything."""
    adds_floats: bool = False
    """Whether the last digits of results depend on the order in which rows are added."""
    makes_objects: bool = False
    """Whether the processor makes Python objects of the columns, and so takes fewer keys at once."""

    takes_columns: ClassVar[bool] = True

    @property
    def batch_watermark_ms(self) -> int:  # type: ignore[override]  # computed here
        return _END_OF_TIME_MS if self.completes_in_batch else -1

    def input(self, columns: list[str]) -> None:
        return None

    def output(self, schema: StructType, zone: str, uid: str) -> RowOutput:
        return RowOutput(schema, uid)


@dataclass(frozen=True)
class ArrowCodecs(ColumnCodecs):
    """Arrow columns, for the user's :class:`statelog.ArrowProcessor`."""

    def adapted(self, processor: Any, calls: ProcessorCalls) -> ArrowCalls:
        return ArrowCalls(
            processor, calls.columns, calls.key_columns, calls.key_codec, calls.output, calls.states, calls.times
        )


def recorded_settings(mode: TimeMode, codecs: ProcessorCodecs) -> Settings:
    """The settings, by name, that a keyed operator's state depends on, besides its schemas."""
    return {"timeMode": str(mode), "windows": "none", **codecs.settings}


def _bytes(text: str) -> int:
    """A size of Spark's configuration, such as 64MB, in bytes; no limit if it cannot be parsed."""
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if found is None:
        return _NO_LIMIT_BYTES
    return int(found[1]) << (10 * "bkmgtp".find((found[2] or "b")[0]))
