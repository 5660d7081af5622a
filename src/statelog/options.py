"""Options of an operator, in one typed place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from statelog.errors import ConfigurationError
from statelog.observer import Observer

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """Options of a stateful operator. All have defaults, and may differ from run to run unless they say otherwise.

    Parameters
    ----------
    table : {"runs", "memory"}
        What the tasks read their state from: the sorted changesets themselves, or dictionaries in the memory
        of each Python worker.
    log_form : {"auto", "append", "object"}
        Whether log entries are appended to one file per run or written as one object each. ``auto`` keeps
        the form of an existing log, and appends where the storage can.
    inline_budget_bytes : int
        Changesets of a checkpoint travel with the acks and become part of the log entry while they are
        smaller than this, divided by the parallelism; larger ones are written by the tasks.
    merge_fan_in : int
        How many runs of about the same size are kept before they are merged; at least 2.
    orphan_min_age_s : float
        Unreferenced objects of earlier runs are removed at start when they are older.
    local_directory : str or None
        Where tasks keep local copies of runs. None is Spark's own scratch directory, which ends with the
        application; in a directory of your own the copies outlive it.
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
    log_form: str = "auto"
    inline_budget_bytes: int = 8 << 20
    merge_fan_in: int = 6
    orphan_min_age_s: float = 3600.0
    local_directory: str | None = None
    heartbeat_s: float | None = None
    observer: Observer = field(default_factory=Observer)

    def __post_init__(self) -> None:
        _require(self.table in ("runs", "memory"), "table", self.table, "'runs' or 'memory'")
        forms = ("auto", "append", "object")
        _require(self.log_form in forms, "log_form", self.log_form, "'auto', 'append' or 'object'")
        _require(self.inline_budget_bytes >= 0, "inline_budget_bytes", self.inline_budget_bytes, "0 or more")
        _require(self.merge_fan_in >= 2, "merge_fan_in", self.merge_fan_in, "2 or more")
        _require(self.orphan_min_age_s >= 0, "orphan_min_age_s", self.orphan_min_age_s, "0 or more")
        _require(_is_heartbeat(self.heartbeat_s), "heartbeat_s", self.heartbeat_s, "None, or a number from 0.1 on")

    @property
    def heartbeat_ms(self) -> int | None:
        """The heartbeat in milliseconds; None if there is none."""
        return None if self.heartbeat_s is None else round(self.heartbeat_s * 1000)


def _is_heartbeat(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
        return False
    return value is None or 0.1 <= value < math.inf


def _require(is_valid: bool, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise ConfigurationError(f"Option {name} is {value!r}.", hint=f"It must be {expected}.")
