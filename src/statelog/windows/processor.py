"""What users write with windows, and are given: processors, windows, and what is known when one is returned."""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from statelog.errors import ConfigurationError, ErrorKind, ProcessorError

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A window of time; the end is not part of it.

    Parameters
    ----------
    start_ms, end_ms : int
        Milliseconds since the Unix epoch.
    """

    start_ms: int
    end_ms: int

    @property
    def start(self) -> datetime.datetime:
        """The start, in UTC."""
        return _EPOCH + datetime.timedelta(milliseconds=self.start_ms)

    @property
    def end(self) -> datetime.datetime:
        """The end, in UTC."""
        return _EPOCH + datetime.timedelta(milliseconds=self.end_ms)


@dataclass(frozen=True, slots=True)
class WindowContext:
    """What is known when a window is returned.

    Parameters
    ----------
    processingTimeMs : int
        The time of the batch, milliseconds since the Unix epoch.
    currentWatermarkMs : int
        The watermark.
    isUpdate : bool
        Whether late rows have come to a window that was complete in a batch before.
    """

    processingTimeMs: int
    currentWatermarkMs: int
    isUpdate: bool = False


@dataclass(frozen=True, slots=True)
class LateRow:
    """An input row, as an output row of the column of late rows."""

    row: Any


class WindowHandle:
    """What :meth:`WindowProcessor.init` declares states with; they belong to the key and its windows share them.

    The methods are those of ``transformWithState``'s handle, without the timers.
    """

    def __init__(self, handle: Any) -> None:
        self.getValueState = handle.getValueState
        self.getListState = handle.getListState
        self.getMapState = handle.getMapState
        self.getReducingState = handle.getReducingState
        self.getAggregatingState = handle.getAggregatingState
        self._handle = handle

    def deleteIfExists(self, stateName: str) -> None:
        """Remove a state's values, of a state that is not the windows' own."""
        if stateName.startswith("window."):
            raise ConfigurationError(
                f"init() deletes '{stateName}', a state of the windows themselves.",
                hint="Delete states that a WindowProcessor has declared.",
            )
        self._handle.deleteIfExists(stateName)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Timers are the windows' own."""
        raise ProcessorError(
            "A WindowProcessor has no timers of its own.",
            kind=ErrorKind.STATE_USAGE,
            hint="Use transformWithState for an operator with timers.",
        )


class WindowProcessor(ABC):
    """Base class of processors that see all rows of a window.

    The order of calls is :meth:`init` once per subtask and batch (and once on the driver, to learn the states),
    :meth:`process` for each window that is returned, and :meth:`close`. Attributes do not last from batch to
    batch; states do.
    """

    def init(self, handle: WindowHandle) -> None:  # noqa: B027 - most processors have no states
        """Declare states; nothing by default."""

    @abstractmethod
    def process(
        self, key: tuple[Any, ...], window: TimeWindow | None, rows: Iterator[Any], context: WindowContext
    ) -> Iterator[Any]:
        """Return output rows for a window.

        Parameters
        ----------
        key : tuple
            The grouping key.
        window : TimeWindow or None
            The window; None if windows are counted.
        rows : iterator of Row
            All of its rows, in order of event time; in order of arrival where that is the same, and where time
            has no part.
        context : WindowContext
            When it is returned.
        """

    def close(self) -> None:  # noqa: B027 - most processors have nothing to do
        """Called after the last window of a batch; does nothing by default."""
