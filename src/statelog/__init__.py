"""Keyed state for PySpark Structured Streaming, made durable by a changelog in every micro-batch."""

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
from statelog.metrics import CheckpointMetrics, Metric, Observer, Recorded, RestoreMetrics, RestoreProgress, Step
from statelog.operators.keyed.values import AggregateFunction
from statelog.operators.unkeyed.processor import OperatorContext, OperatorHandle, OperatorProcessor
from statelog.operators.unkeyed.states import BroadcastState, OperatorListState
from statelog.options import Options
from statelog.runs.times import Ttl, Watermark
from statelog.spark.placement import spark_conf
from statelog.spark.query_errors import error_of
from statelog.storage import ObjectInfo, Store, register_store
from statelog.streams.keyed import KeyedStream, key_by
from statelog.streams.orphans import list_orphans
from statelog.streams.repair import Rewound, rewind
from statelog.streams.save_restore import Restored, Savepoint, restore, savepoint
from statelog.streams.unkeyed import process
from statelog.streams.windowed import WindowedStream, late, on_time
from statelog.windows.aggregates import Aggregate, Collect, Count, CountDistinct, First, Last, Max, Mean, Min, Sum
from statelog.windows.assigners import CountWindows, SessionWindows, SlidingWindows, TumblingWindows
from statelog.windows.processor import TimeWindow, WindowContext, WindowHandle, WindowProcessor

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
    "ObjectInfo",
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
    "Store",
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
    "register_store",
    "restore",
    "rewind",
    "savepoint",
    "spark_conf",
]
