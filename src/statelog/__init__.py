"""Keyed state for PySpark Structured Streaming, made durable by a changelog in every micro-batch."""

from statelog.errors import (
    ConfigurationError,
    CorruptionError,
    ErrorKind,
    FencedError,
    ProcessorError,
    ProtocolError,
    StatelogError,
    StateMissingError,
    StorageError,
)
from statelog.observer import CheckpointMetrics, Observer, RestoreMetrics, Step
from statelog.options import Options
from statelog.spark.keyed_stream import KeyedStream, key_by
from statelog.spark.process import process
from statelog.spark.rewind import Rewound, rewind
from statelog.state.operator_processor import OperatorContext, OperatorHandle, OperatorProcessor
from statelog.state.operator_state import BroadcastState, OperatorListState
from statelog.state.times import Ttl, Watermark
from statelog.state.value_states import AggregateFunction

__all__ = [
    "AggregateFunction",
    "BroadcastState",
    "CheckpointMetrics",
    "ConfigurationError",
    "CorruptionError",
    "ErrorKind",
    "FencedError",
    "KeyedStream",
    "Observer",
    "OperatorContext",
    "OperatorHandle",
    "OperatorListState",
    "OperatorProcessor",
    "Options",
    "ProcessorError",
    "ProtocolError",
    "RestoreMetrics",
    "Rewound",
    "StateMissingError",
    "StatelogError",
    "Step",
    "StorageError",
    "Ttl",
    "Watermark",
    "key_by",
    "process",
    "rewind",
]
