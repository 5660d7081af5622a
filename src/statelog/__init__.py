"""Keyed state for PySpark Structured Streaming, made durable by a changelog in every micro-batch."""

from statelog.checkpoint.leftovers import list_orphans
from statelog.errors import (
    ConfigurationError,
    ConfigurationWarning,
    CorruptionError,
    ErrorKind,
    FencedError,
    ProcessorError,
    ProtocolError,
    StatelogError,
    StateMissingError,
    StorageError,
)
from statelog.metrics import Metric, Recorded
from statelog.observer import CheckpointMetrics, Observer, RestoreMetrics, RestoreProgress, Step
from statelog.options import Options
from statelog.spark.keyed_stream import KeyedStream, key_by
from statelog.spark.placement import spark_conf
from statelog.spark.process import process
from statelog.spark.query_errors import error_of
from statelog.spark.rewind import Rewound, rewind
from statelog.spark.savepoints import Restored, Savepoint, restore, savepoint
from statelog.state.operator_processor import OperatorContext, OperatorHandle, OperatorProcessor
from statelog.state.operator_state import BroadcastState, OperatorListState
from statelog.state.times import Ttl, Watermark
from statelog.state.value_states import AggregateFunction
from statelog.windows.aggregates import Aggregate, Collect, Count, CountDistinct, First, Last, Max, Mean, Min, Sum
from statelog.windows.assigners import CountWindows, SessionWindows, SlidingWindows, TumblingWindows
from statelog.windows.processor import TimeWindow, WindowContext, WindowHandle, WindowProcessor
from statelog.windows.windowed_stream import WindowedStream, late, on_time

__all__ = [
    "Aggregate",
    "AggregateFunction",
    "BroadcastState",
    "CheckpointMetrics",
    "Collect",
    "ConfigurationError",
    "ConfigurationWarning",
    "CorruptionError",
    "Count",
    "CountDistinct",
    "CountWindows",
    "ErrorKind",
    "FencedError",
    "First",
    "KeyedStream",
    "Last",
    "Max",
    "Mean",
    "Metric",
    "Min",
    "Observer",
    "OperatorContext",
    "OperatorHandle",
    "OperatorListState",
    "OperatorProcessor",
    "Options",
    "ProcessorError",
    "ProtocolError",
    "Recorded",
    "RestoreMetrics",
    "RestoreProgress",
    "Restored",
    "Rewound",
    "Savepoint",
    "SessionWindows",
    "SlidingWindows",
    "StateMissingError",
    "StatelogError",
    "Step",
    "StorageError",
    "Sum",
    "TimeWindow",
    "Ttl",
    "TumblingWindows",
    "Watermark",
    "WindowContext",
    "WindowHandle",
    "WindowProcessor",
    "WindowedStream",
    "error_of",
    "key_by",
    "late",
    "list_orphans",
    "on_time",
    "process",
    "restore",
    "rewind",
    "savepoint",
    "spark_conf",
]
