"""The classes with which users process windows: processor, window, context, and handle."""

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
    """The times at which a window is returned, and whether it is an update.

    Parameters
    ----------
    processingTimeMs : int
        The time of the batch, milliseconds since the Unix epoch.
    currentWatermarkMs : int
        The watermark, milliseconds since the Unix epoch.
    isUpdate : bool
        Whether the window was complete in an earlier batch, and has received late rows since.
    """

    processingTimeMs: int
    currentWatermarkMs: int
    isUpdate: bool = False


class WindowHandle:
    """Declares states in :meth:`WindowProcessor.init`; they belong to the key, and its windows share them.

    It has the methods of ``transformWithState``'s handle, without the timers.
    """

    def __init__(self, handle: Any) -> None:
        self.getValueState = handle.getValueState
        self.getListState = handle.getListState
        self.getMapState = handle.getMapState
        self.getReducingState = handle.getReducingState
        self.getAggregatingState = handle.getAggregatingState
        self._handle = handle

    def deleteIfExists(self, stateName: str) -> None:
        """Delete a state of a processor; the windows' own states are refused."""
        if stateName.startswith("window."):
            raise ConfigurationError(
                f"init() deletes '{stateName}', a state of the windows themselves.",
                hint="Delete only states that a WindowProcessor has declared.",
            )
        self._handle.deleteIfExists(stateName)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        """Refuse: only the windows themselves have timers."""
        raise ProcessorError(
            "A WindowProcessor has no timers of its own.",
            kind=ErrorKind.STATE_USAGE,
            hint="Use transformWithState for an operator with timers.",
        )


class WindowProcessor(ABC):
    """Base class of processors that see all rows of a window.

    Calls come in this order: :meth:`init` once per subtask and batch (and once on the driver, to learn the states),
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
            The window; None for count windows.
        rows : iterator of Row
            All rows of the window in order of event time, read as they are requested. Rows with the same event time,
            and rows without event time, are in order of arrival.
        context : WindowContext
            The times at which the window is returned.

        Returns
        -------
        iterator of Row
            The output rows.
        """

    def close(self) -> None:  # noqa: B027 - most processors have nothing to do
        """Called after the last window of a batch; does nothing by default."""
