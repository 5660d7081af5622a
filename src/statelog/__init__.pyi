from .aggregates.functions import (
    Aggregate,
    ApproxCountDistinct,
    Collect,
    Count,
    CountDistinct,
    First,
    Last,
    Max,
    Mean,
    Min,
    Quantiles,
    StandardDeviation,
    Sum,
    Variance,
)
from .convert.arrow import (
    ArrowBatch,
    ArrowEntries,
    ArrowHandle,
    ArrowListState,
    ArrowMapState,
    ArrowProcessor,
    ArrowTimers,
    ArrowValueState,
)
from .errors import (
    ConfigurationError,
    ConfigurationWarning,
    CorruptionError,
    ErrorKind,
    FencedError,
    PinExpiredError,
    ProcessorError,
    ProtocolError,
    StatelogError,
    StateMissingError,
    StorageError,
)
from .metrics import (
    CheckpointMetrics,
    HotKey,
    HotKeyGroup,
    Meaning,
    Metric,
    Observer,
    Recorded,
    RestoreMetrics,
    RestoreProgress,
    StateMetrics,
    Step,
    SubtaskMetrics,
    meanings,
)
from .operators.keyed.values import AggregateFunction
from .operators.unkeyed.processor import OperatorContext, OperatorHandle, OperatorProcessor
from .operators.unkeyed.states import BroadcastState, OperatorListState
from .options import Options, Tuning
from .queries.branch import branch
from .queries.migrate import migrate
from .queries.orphans import delete_orphans, list_orphans
from .queries.rename import Forgotten, Renamed, forget, rename
from .queries.rewind import FellBack, Rewound, fall_back, rewind
from .queries.save_restore import Restored, Savepoint, restore, savepoint
from .reading.changes import read_changes
from .reading.compare import StateComparison, compare
from .reading.diff import read_diff
from .reading.history import read_history
from .reading.listing import (
    CheckpointInfo,
    OperatorInfo,
    StateInfo,
    list_checkpoints,
    list_operators,
    list_states,
)
from .reading.pins import PinInfo, list_pins, pin, unpin
from .reading.read import StateReader, open_state, read_state
from .reading.stats import KeyStats, OperatorStats, StateStats, stats
from .reading.verify import Damage, Verified, verify
from .runs.times import Ttl, Watermark
from .spark.driver.endpoint import error_of
from .spark.driver.hadoop_credentials import use_s3a_settings
from .spark.plan.placement import spark_conf
from .spark.source.data_source import StateSource
from .storage import ObjectInfo, Store, register_store
from .streams.keyed import KeyedStream, key_by
from .streams.unkeyed import process
from .streams.windowed import WindowedStream, late, on_time
from .streams.write_ahead import write_ahead
from .tools.doctor.doctor import doctor
from .tools.doctor.finding import Finding
from .tools.exporters.opentelemetry import export_to_opentelemetry
from .tools.exporters.prometheus import MetricsServer, prometheus_collector, serve_metrics
from .tools.pages.server import PageServer
from .tools.pages.ui import Summary, report, show, ui
from .windows.assigners import CountWindows, SessionWindows, SlidingWindows, TumblingWindows
from .windows.processor import TimeWindow, WindowContext, WindowHandle, WindowProcessor

__all__ = [
    "Aggregate",
    "AggregateFunction",
    "ApproxCountDistinct",
    "ArrowBatch",
    "ArrowEntries",
    "ArrowHandle",
    "ArrowListState",
    "ArrowMapState",
    "ArrowProcessor",
    "ArrowTimers",
    "ArrowValueState",
    "BroadcastState",
    "CheckpointInfo",
    "CheckpointMetrics",
    "Collect",
    "ConfigurationError",
    "ConfigurationWarning",
    "CorruptionError",
    "Count",
    "CountDistinct",
    "CountWindows",
    "Damage",
    "ErrorKind",
    "FellBack",
    "FencedError",
    "Finding",
    "First",
    "Forgotten",
    "HotKey",
    "HotKeyGroup",
    "KeyStats",
    "KeyedStream",
    "Last",
    "Max",
    "Mean",
    "Meaning",
    "Metric",
    "MetricsServer",
    "Min",
    "ObjectInfo",
    "Observer",
    "OperatorContext",
    "OperatorHandle",
    "OperatorInfo",
    "OperatorListState",
    "OperatorProcessor",
    "OperatorStats",
    "Options",
    "PageServer",
    "PinExpiredError",
    "PinInfo",
    "ProcessorError",
    "ProtocolError",
    "Quantiles",
    "Recorded",
    "Renamed",
    "RestoreMetrics",
    "RestoreProgress",
    "Restored",
    "Rewound",
    "Savepoint",
    "SessionWindows",
    "SlidingWindows",
    "StandardDeviation",
    "StateComparison",
    "StateInfo",
    "StateMetrics",
    "StateMissingError",
    "StateReader",
    "StateSource",
    "StateStats",
    "StatelogError",
    "Step",
    "StorageError",
    "Store",
    "SubtaskMetrics",
    "Sum",
    "Summary",
    "TimeWindow",
    "Ttl",
    "TumblingWindows",
    "Tuning",
    "Variance",
    "Verified",
    "Watermark",
    "WindowContext",
    "WindowHandle",
    "WindowProcessor",
    "WindowedStream",
    "branch",
    "compare",
    "delete_orphans",
    "doctor",
    "error_of",
    "export_to_opentelemetry",
    "fall_back",
    "forget",
    "key_by",
    "late",
    "list_checkpoints",
    "list_operators",
    "list_orphans",
    "list_pins",
    "list_states",
    "meanings",
    "migrate",
    "on_time",
    "open_state",
    "pin",
    "process",
    "prometheus_collector",
    "read_changes",
    "read_diff",
    "read_history",
    "read_state",
    "register_store",
    "rename",
    "report",
    "restore",
    "rewind",
    "savepoint",
    "serve_metrics",
    "show",
    "spark_conf",
    "stats",
    "ui",
    "unpin",
    "use_s3a_settings",
    "verify",
    "write_ahead",
]
