"""The options of an operator and its query, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Final, Generic, TypeVar

from statelog.errors import ConfigurationError
from statelog.metrics import Observer
from statelog.numbers import Seconds, in_seconds, is_finite, is_whole

TABLES: Final = ("runs", "memory", "rocksdb")
"""The values of the option `table`."""


_INLINE_BYTES: Final = 8 << 20
_INLINE_OBJECT_BYTES: Final = 32 << 20


_Given = TypeVar("_Given")
_Held = TypeVar("_Held")


class InSeconds(Generic[_Given, _Held]):
    """An option's field that holds seconds, and also accepts timedeltas and words."""

    def __init__(self, default: _Held) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> _Held:
        held: _Held = self._default if instance is None else vars(instance)[self._name]
        return held

    def __set__(self, instance: object, value: _Given) -> None:
        is_none = value is None and self._default is None
        vars(instance)[self._name] = None if is_none else in_seconds(value, f"Option {self._name}")


_Span = InSeconds[Seconds, float]
_SpanOrNone = InSeconds[Seconds | None, float | None]


@dataclass(frozen=True)
class _Range:
    """The numbers that an option may be."""

    least: float
    is_whole: bool = False
    is_above: bool = False
    """Whether the least number itself is refused."""
    may_be_none: bool = False

    def fits(self, value: Any) -> bool:
        """Whether a value is in the range."""
        if value is None:
            return self.may_be_none
        if not (is_whole(value) if self.is_whole else is_finite(value)):
            return False
        return bool(value > self.least if self.is_above else value >= self.least)

    @property
    def words(self) -> str:
        """The range in a hint."""
        number = "a whole number" if self.is_whole else "a finite number"
        within = f"more than {self.least:g}" if self.is_above else f"{self.least:g} or more"
        return f"{'None, or ' if self.may_be_none else ''}{number}, {within}"


_RANGES: Final = (
    ("retained_checkpoints merge_fan_in", _Range(2, is_whole=True)),
    ("max_file_bytes upload_part_bytes max_in_flight_bytes upload_threads upload_attempts", _Range(1, is_whole=True)),
    ("materialization_max_failures", _Range(0, is_whole=True)),
    ("inline_budget_bytes", _Range(0, is_whole=True, may_be_none=True)),
    ("max_space_amplification", _Range(1)),
    (
        "materialization_interval_s max_log_to_base replay_budget_s upload_retry_delay_s log_min_age_s"
        " orphan_min_age_s",
        _Range(0),
    ),
    ("upload_timeout_s driver_timeout_s", _Range(0, is_above=True)),
    ("restore_deadline_s", _Range(0, is_above=True, may_be_none=True)),
    ("heartbeat_s", _Range(0.1, may_be_none=True)),
)
"""Names of the options that are numbers, and their ranges."""

_CHECKS: Final[tuple[tuple[str, Callable[[Any], bool], str], ...]] = (
    ("table", lambda value: value in TABLES, "'runs', 'memory' or 'rocksdb'"),
    ("file_merging", lambda value: value in ("auto", "across", "within", "off"), "'auto', 'across', 'within' or 'off'"),
    ("compression", lambda value: value in ("lz4", "zstd", "none"), "'lz4', 'zstd' or 'none'"),
    ("placement", lambda value: value in ("auto", "on", "off"), "'auto', 'on' or 'off'"),
    ("changelog materialization plain_local_files redact_keys", lambda value: isinstance(value, bool), "True or False"),
    *((names, range_.fits, range_.words) for names, range_ in _RANGES),
    (
        "retained_s",
        lambda value: (
            isinstance(value, Mapping)
            and all(is_finite(every) and is_finite(kept) and 0 < every <= kept for every, kept in value.items())
        ),
        "a mapping of seconds to seconds: from an interval to the longer time for which its first checkpoint is kept",
    ),
    (
        "local_directory",
        lambda value: value is None or (isinstance(value, str | PathLike) and bool(str(value).strip())),
        "None, or the path of a directory",
    ),
    ("observer", lambda value: isinstance(value, Observer), "an instance of statelog.Observer"),
    ("tuning", lambda value: isinstance(value, Tuning), "an instance of statelog.Tuning"),
)
"""Names of options, the test of their values, and the words for it in a hint."""


def _check(options: Options | Tuning) -> None:
    """Refuse values that an option cannot have. Convert NumPy's numbers to Python's, which every format can store."""
    for names, is_valid, expected in _CHECKS:
        for name in names.split():
            if hasattr(options, name) and not is_valid(getattr(options, name)):
                value = getattr(options, name)
                raise ConfigurationError(f"Option {name} is {value!r:.80}.", hint=f"It must be {expected}.")
    for names, range_ in _RANGES:
        for name in names.split():
            value = getattr(options, name, None)
            if value is not None:
                object.__setattr__(options, name, int(value) if range_.is_whole else float(value))


@dataclass(frozen=True)
class Tuning:
    """Settings that few queries need, for :class:`Options`: how often and how large things are stored.

    ``max_file_bytes``, ``log_min_age_s``, ``orphan_min_age_s``, ``upload_attempts``, ``upload_timeout_s`` and
    ``upload_retry_delay_s`` are the query's: they must be equal in all its operators.

    Parameters
    ----------
    max_file_bytes : int
        Size limit of a file that several checkpoints share; the next checkpoint begins another.
    changelog : bool
        Whether a checkpoint of keyed state holds its changes only, with the full state materialized from time to
        time. Without a changelog every checkpoint stores the new and merged runs of its subtasks before it is
        complete.
    materialization : bool
        Whether keyed state is materialized: stored as merged runs, so that older changesets can be deleted. Without
        it the query's log grows without bound, with the changes of all its operators.
    materialization_max_failures : int
        The query fails if the materializations of one subtask fail more often than this in a row.
    max_log_to_base : float
        A subtask materializes earlier if its changesets are larger than 1 MB and than this many times its materialized
        state; at most a fortieth of the time goes to this. So does an operator that alone keeps more of the log than
        this many times the materialized state of all operators.
    upload_part_bytes : int
        A subtask whose changes become larger in memory writes them in parts of this size while the batch runs.
    upload_threads : int
        Objects that a subtask writes at a time.
    upload_attempts : int
        Attempts at a request to an object store. With 1, nothing is repeated or hedged.
    upload_timeout_s : float, timedelta or str
        A write that takes longer than this, or than 97 % of earlier writes, gets a second attempt in parallel; the
        first to finish counts. At most 5 % of the requests are such attempts.
    upload_retry_delay_s : float, timedelta or str
        A failed request is repeated after a random time up to this, then up to twice this, and so on.
    merge_fan_in : int
        Number of runs of about the same size that are merged into one; at least 2.
    log_min_age_s : float, timedelta or str
        The log keeps an older start's claim for this long, so that a driver that was suspended meanwhile finds it. A
        driver that was suspended for longer than half of this reads the whole log.
    orphan_min_age_s : float, timedelta or str
        A start removes unreferenced objects of earlier starts that are older than this.

    Raises
    ------
    ConfigurationError
        If a value has the wrong type or is out of range. NumPy's whole numbers are accepted, too.
    """

    max_file_bytes: int = 32 << 20
    changelog: bool = True
    materialization: bool = True
    materialization_max_failures: int = 3
    max_log_to_base: float = 0.75
    upload_part_bytes: int = 5 << 20
    upload_threads: int = 5
    upload_attempts: int = 3
    upload_timeout_s: _Span = _Span(1.0)
    upload_retry_delay_s: _Span = _Span(0.5)
    merge_fan_in: int = 6
    log_min_age_s: _Span = _Span(60.0)
    orphan_min_age_s: _Span = _Span(3600.0)

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True)
class Options:
    """Options of a stateful operator. All have defaults, and may differ between starts unless they say otherwise.

    Some options are the query's, because the query has one log and one location: ``file_merging``,
    ``max_space_amplification``, ``retained_checkpoints``, ``retained_s``, ``inline_budget_bytes``,
    ``driver_timeout_s``, ``heartbeat_s``, ``placement``, and some of ``tuning``. They must be equal in all operators of
    a query; a start with different values is refused. The others are each operator's own.

    Options that end in ``_s`` take a number of seconds, a ``datetime.timedelta``, or a string as in Spark, such as
    ``"1 hour 30 minutes"``.

    Parameters
    ----------
    table : {"runs", "memory", "rocksdb"}
        Where tasks look up state: in the sorted changesets themselves, in dictionaries in the memory of each
        Python worker, or in RocksDB databases next to the local copies (``pip install statelog[rocksdb]``).
    file_merging : {"auto", "across", "within", "off"}
        Which changesets share a file: those of successive checkpoints (across), those of one checkpoint (within), or
        none (off), so that every subtask writes a file per checkpoint. ``auto`` means ``across`` if the storage can
        append, and ``within`` otherwise.
    max_space_amplification : float
        Upper bound of the space amplification of all operators of the query: the size of the files that hold snapshots,
        large changesets and materialized runs, divided by the bytes in them that retained checkpoints need; at least
        1. Above it, the needed parts of the files with the most garbage are stored again: snapshots with the next
        checkpoint, keyed state by a materialization.
    retained_checkpoints : int
        Number of newest checkpoints that can be restored; at least 2. Files that only older ones need are deleted:
        unkeyed state at once, changesets of keyed state once the state is materialized.
    retained_s : mapping of float, timedelta or str to the same
        Checkpoints that can be read for longer: the key is an interval, whose first checkpoint is kept, and the value
        is the time for which it is kept. ``{60: 3600, 3600: 86400}`` keeps one per minute for an hour and one per hour
        for a day. See docs/reading-state.md.
    materialization_interval_s : float, timedelta or str
        How often each subtask materializes its state if it has changes; subtasks do it at different times.
    replay_budget_s : float, timedelta or str
        A subtask materializes earlier if a restart is estimated to need longer than this to read its changesets.
    restore_deadline_s : float, timedelta, str or None
        A subtask that takes longer to restore its state, its RocksDB table included, fails and names the missing
        part. None for no limit.
    driver_timeout_s : float, timedelta or str
        A task fails if the driver takes longer to reply. The last task of a query's batch waits until the checkpoint
        is durable.
    inline_budget_bytes : int or None
        Up to this many bytes of changes in a batch travel with the acks and become part of the log entry; all subtasks
        of all operators share this budget. Tasks write larger changesets themselves. None for 8 MiB in a directory, and
        32 MiB in an object store, whose writes take longer.
    compression : {"lz4", "zstd", "none"}
        Compression of stored keyed state. Files written with another setting stay readable.
    max_in_flight_bytes : int
        A subtask waits while more bytes than this are being written.
    local_directory : str or None
        Directory of the local copies of runs. None for Spark's scratch directory, which is removed with the
        application; in a directory of your own the copies outlive it. Those of subtasks that have not run on the host
        for a week are removed.
    plain_local_files : bool
        Whether local copies of state may be stored although ``spark.io.encryption.enabled`` is true: statelog maps
        them into memory, so it cannot encrypt them. Otherwise such an application is refused.
    redact_keys : bool
        Whether the metrics, messages and pages of this operator show dots instead of keys and values. The texts of
        exceptions raised by your code or a library are not changed.
    placement : {"auto", "on", "off"}
        Whether a subtask stays on the executor that has its local files. ``auto`` does so if the application can have
        more than one executor and its Spark configuration includes ``statelog.spark_conf()``. See docs/placement.md.
    heartbeat_s : float, timedelta, str or None
        Run a batch at least this often, even without data, so that timers and windows in processing time fire; at
        least 0.1. None for no heartbeat. The trigger ``availableNow`` ignores it. See docs/time.md for setting or
        removing it in a query that has run.
    observer : Observer
        Receives steps and metrics.
    tuning : Tuning
        Settings that few queries need.

    Raises
    ------
    ConfigurationError
        If a value has the wrong type or is out of range. NumPy's whole numbers are accepted, too.
    """

    table: str = "runs"
    file_merging: str = "auto"
    max_space_amplification: float = 2.0
    retained_checkpoints: int = 10
    retained_s: Mapping[Any, Seconds] = field(default_factory=dict)
    materialization_interval_s: _Span = _Span(600.0)
    replay_budget_s: _Span = _Span(10.0)
    restore_deadline_s: _SpanOrNone = _SpanOrNone(None)
    driver_timeout_s: _Span = _Span(600.0)
    inline_budget_bytes: int | None = None
    compression: str = "lz4"
    max_in_flight_bytes: int = 100 << 20
    local_directory: str | None = None
    plain_local_files: bool = False
    redact_keys: bool = False
    placement: str = "auto"
    heartbeat_s: _SpanOrNone = _SpanOrNone(None)
    observer: Observer = field(default_factory=Observer)
    tuning: Tuning = field(default_factory=Tuning)

    def __post_init__(self) -> None:
        if isinstance(self.retained_s, Mapping):
            spans = {_retained(every): _retained(kept) for every, kept in self.retained_s.items()}
            object.__setattr__(self, "retained_s", spans)
        _check(self)

    def for_store(self, *, can_append: bool) -> Options:
        """These options, with values that suit the store for those that are None."""
        if self.inline_budget_bytes is not None:
            return self
        return replace(self, inline_budget_bytes=_INLINE_BYTES if can_append else _INLINE_OBJECT_BYTES)

    def inline_bytes(self, parallelism: int) -> int:
        """Size limit for a subtask's changeset that travels with its ack."""
        budget = _INLINE_BYTES if self.inline_budget_bytes is None else self.inline_budget_bytes
        return 0 if self.file_merging == "off" else budget // parallelism

    @property
    def codec(self) -> str | None:
        """Arrow's name of the compression; None for none."""
        return None if self.compression == "none" else self.compression

    @property
    def heartbeat_ms(self) -> int | None:
        """The heartbeat in milliseconds; None for no heartbeat."""
        return None if self.heartbeat_s is None else round(self.heartbeat_s * 1000)

    @property
    def retained_spans_s(self) -> dict[float, float]:
        """The option `retained_s` in seconds."""
        return {_retained(every): _retained(kept) for every, kept in self.retained_s.items()}


def _retained(given: Seconds) -> float:
    return in_seconds(given, "A time in the option retained_s")
