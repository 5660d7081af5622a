"""Decides when an entry repeats the base map, so that older log files can be deleted."""

from __future__ import annotations

from typing import Final

from statelog.checkpoint.bases import BaseMap
from statelog.checkpoint.history import Record

_RANGE_BYTES: Final = 100
_RUN_BYTES: Final = 60
_SEGMENT_BYTES: Final = 80


class Truncation:
    """Decides which entries repeat the base map.

    An entry does if the log can then begin later, and if the log has grown by as many bytes since the last repetition.
    So repetitions at most double the log.
    """

    def __init__(self) -> None:
        self._repeated_through = -1
        self._grown_bytes = 0
        self._seen: BaseMap | None = None
        self._seen_through = -1
        self._seen_bytes = 0

    def base_map_to_repeat(self, before: Record) -> BaseMap | None:
        """The base map that the entry after a checkpoint repeats; None if it need not."""
        base_map = before.base_map
        if base_map is None:
            return None
        if base_map is not self._seen:
            runs = sum([len(level.runs) for base_range in base_map.ranges for level in base_range.base.levels])
            self._seen, self._seen_through = base_map, base_map.through
            self._seen_bytes = _RANGE_BYTES * len(base_map.ranges) + _RUN_BYTES * runs
        is_useful = self._seen_through > self._repeated_through
        return base_map if is_useful and self._seen_bytes <= self._grown_bytes else None

    def committed(self, record: Record, repeated: BaseMap | None, payload_bytes: int) -> None:
        """Note that an entry is durable."""
        if repeated is not None:
            self._repeated_through, self._grown_bytes = self._seen_through, 0
        self._grown_bytes += payload_bytes + _SEGMENT_BYTES * len(record.checkpoint.segments)
