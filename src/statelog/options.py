"""The options of an operator, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from statelog.errors import ConfigurationError
from statelog.metrics import Observer

TABLES: Final = ("runs", "memory", "rocksdb")
"""The values of the option `table`."""


@dataclass(frozen=True)
class Options:
    """Options of a stateful operator. All have defaults, and may differ between starts unless they say otherwise.

    Parameters
    ----------
    table : {"runs", "memory", "rocksdb"}
        What the tasks read their state from: the sorted changesets themselves, dictionaries in the memory of each
        Python worker, or RocksDB databases beside the local copies, which need ``pip install statelog[rocksdb]``. It
        may be changed at every start.
    file_merging : {"auto", "across", "within", "off"}
        What shares a file: the changesets of successive checkpoints, those of one checkpoint, or nothing: then every
        subtask writes a file per checkpoint. ``auto`` is ``across`` where the storage can append, else ``within``.
        It may be changed at every start.
    max_file_bytes : int
        A file of several checkpoints that would become larger is followed by another.
    max_space_amplification : float
        How many times as large as what is needed of them the files of operator state may be, before what is needed is
        moved out of the most wasteful ones; at least 1.
    retained_checkpoints : int
        Checkpoints that can be gone back to, the newest included; at least 2. What only older ones need is deleted:
        operator state at once, changesets of keyed state once it is materialized.
    changelog : bool
        Whether a checkpoint of keyed state is its changes, and the state is materialized from time to time. Without the
        changelog every checkpoint stores what is new or merged of the subtasks' runs before it is complete. It
        may be changed at every start.
    materialization : bool
        Whether keyed state is materialized: its local runs are stored merged, and the changesets before are given up.
        Without it the log grows for ever.
    materialization_interval_s : float
        How often, for each subtask, at different times; if it has changes.
    materialization_max_failures : int
        After more failures in a row of one subtask the query fails.
    max_log_to_base : float
        A subtask whose changesets are larger than this times its materialized state, and than 1 MB, is materialized
        earlier.
    replay_budget_s : float
        A subtask whose changesets would take longer to be read by a restart, by estimate, is materialized earlier.
    restore_deadline_s : float or None
        A subtask whose state is not restored after so long, its RocksDB table included, fails and says what it lacks.
        None is never.
    driver_timeout_s : float
        A task that waits longer for an answer of the driver fails. The last task of a batch waits until the checkpoint
        is durable.
    inline_budget_bytes : int
        Changesets of a checkpoint travel with the acks and become part of the log entry while they are
        smaller than this, divided by the parallelism; larger ones are written by the tasks.
    compression : {"lz4", "zstd", "none"}
        Of what is stored of keyed state. Files that were written with another setting stay readable.
    upload_part_bytes : int
        A subtask whose changes become larger in memory writes them in parts of this size while the batch runs.
    max_in_flight_bytes : int
        A subtask with so many bytes waiting to be written waits before it goes on.
    upload_threads : int
        Objects that a subtask writes at a time.
    upload_attempts : int
        How often a request to an object store is attempted. With 1 nothing is repeated or hedged.
    upload_timeout_s : float
        A write that takes longer gets a second attempt beside it, the sooner of which counts; also one that takes
        longer than 97 % of the writes before. At most 5 % of the requests are such attempts.
    upload_retry_delay_s : float
        Before a request that failed is repeated, a random time up to this passes, then up to twice this, and so on.
    merge_fan_in : int
        How many runs of about the same size are kept before they are merged; at least 2.
    log_min_age_s : float
        How long the log keeps the claim of an older run that it does not need, so that a driver that was suspended
        meanwhile finds it. A driver that was suspended for longer than half of this looks at the whole log.
    orphan_min_age_s : float
        Unreferenced objects of earlier runs are removed at start when they are older.
    local_directory : str or None
        Where tasks keep local copies of runs. None is Spark's own scratch directory, which ends with the
        application; in a directory of your own the copies outlive it.
    placement : {"auto", "on", "off"}
        Whether a subtask stays on the executor that has its local files. ``auto`` does so if the application can have
        more than one executor and Spark has been told ``statelog.spark_conf()``. See docs/placement.md.
    heartbeat_s : float or None
        Run a batch at least this often, without data too, so that timers and windows in processing time fire; at
        least 0.1. None is never. It has no effect with the trigger ``availableNow``. In an operator that does not go
        by event time it must be set from the query's first start on or never, because the heartbeat is a source of
        the query, and Spark does not let their number change; its value may differ from run to run.
    observer : Observer
        Told about steps and measurements.

    Raises
    ------
    ConfigurationError
        If a value is out of its range.
    """

    table: str = "runs"
    file_merging: str = "auto"
    max_file_bytes: int = 32 << 20
    max_space_amplification: float = 2.0
    retained_checkpoints: int = 10
    changelog: bool = True
    materialization: bool = True
    materialization_interval_s: float = 600.0
    materialization_max_failures: int = 3
    max_log_to_base: float = 0.75
    replay_budget_s: float = 10.0
    restore_deadline_s: float | None = None
    driver_timeout_s: float = 600.0
    inline_budget_bytes: int = 8 << 20
    compression: str = "lz4"
    upload_part_bytes: int = 5 << 20
    max_in_flight_bytes: int = 100 << 20
    upload_threads: int = 5
    upload_attempts: int = 3
    upload_timeout_s: float = 1.0
    upload_retry_delay_s: float = 0.5
    merge_fan_in: int = 6
    log_min_age_s: float = 60.0
    orphan_min_age_s: float = 3600.0
    local_directory: str | None = None
    placement: str = "auto"
    heartbeat_s: float | None = None
    observer: Observer = field(default_factory=Observer)

    def __post_init__(self) -> None:
        _require(self.table in TABLES, "table", self.table, "'runs', 'memory' or 'rocksdb'")
        modes = ("auto", "across", "within", "off")
        _require(self.file_merging in modes, "file_merging", self.file_merging, "'auto', 'across', 'within' or 'off'")
        _require(self.max_file_bytes >= 1, "max_file_bytes", self.max_file_bytes, "1 or more")
        _require(
            self.max_space_amplification >= 1, "max_space_amplification", self.max_space_amplification, "1 or more"
        )
        _require(self.retained_checkpoints >= 2, "retained_checkpoints", self.retained_checkpoints, "2 or more")
        for name in (
            "materialization_interval_s",
            "materialization_max_failures",
            "max_log_to_base",
            "replay_budget_s",
        ):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        deadline_s = self.restore_deadline_s
        _require(deadline_s is None or deadline_s > 0, "restore_deadline_s", deadline_s, "None, or more than 0")
        _require(
            0 < self.driver_timeout_s < math.inf, "driver_timeout_s", self.driver_timeout_s, "more than 0, and finite"
        )
        _require(self.log_min_age_s >= 0, "log_min_age_s", self.log_min_age_s, "0 or more")
        _require(self.inline_budget_bytes >= 0, "inline_budget_bytes", self.inline_budget_bytes, "0 or more")
        _require(
            self.compression in ("lz4", "zstd", "none"), "compression", self.compression, "'lz4', 'zstd' or 'none'"
        )
        for name in ("upload_part_bytes", "max_in_flight_bytes", "upload_threads", "upload_attempts"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _require(self.upload_timeout_s > 0, "upload_timeout_s", self.upload_timeout_s, "more than 0")
        _require(self.upload_retry_delay_s >= 0, "upload_retry_delay_s", self.upload_retry_delay_s, "0 or more")
        for name in ("changelog", "materialization"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _require(self.merge_fan_in >= 2, "merge_fan_in", self.merge_fan_in, "2 or more")
        _require(self.orphan_min_age_s >= 0, "orphan_min_age_s", self.orphan_min_age_s, "0 or more")
        _require(self.placement in ("auto", "on", "off"), "placement", self.placement, "'auto', 'on' or 'off'")
        _require(_is_heartbeat(self.heartbeat_s), "heartbeat_s", self.heartbeat_s, "None, or a number from 0.1 on")

    def inline_bytes(self, parallelism: int) -> int:
        """Size limit for a subtask's changeset that travels with its ack."""
        return 0 if self.file_merging == "off" else self.inline_budget_bytes // parallelism

    @property
    def codec(self) -> str | None:
        """Arrow's name of the compression; None for none."""
        return None if self.compression == "none" else self.compression

    @property
    def heartbeat_ms(self) -> int | None:
        """The heartbeat in milliseconds; None for no heartbeat."""
        return None if self.heartbeat_s is None else round(self.heartbeat_s * 1000)


def _is_heartbeat(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
        return False
    return value is None or 0.1 <= value < math.inf


def _require(is_valid: bool, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise ConfigurationError(f"Option {name} is {value!r}.", hint=f"It must be {expected}.")
