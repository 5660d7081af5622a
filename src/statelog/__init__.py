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
from statelog.spark.plan import KeyedStream, key_by
from statelog.spark.rewind import Rewound, rewind

__all__ = [
    "CheckpointMetrics",
    "ConfigurationError",
    "CorruptionError",
    "ErrorKind",
    "FencedError",
    "KeyedStream",
    "Observer",
    "Options",
    "ProcessorError",
    "ProtocolError",
    "RestoreMetrics",
    "Rewound",
    "StateMissingError",
    "StatelogError",
    "Step",
    "StorageError",
    "key_by",
    "rewind",
]
