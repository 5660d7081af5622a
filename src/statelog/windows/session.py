"""Session windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Final

from statelog.convert.codecs import ProcessorCodecs
from statelog.windows.accumulators import Contents
from statelog.windows.operator import Clock, WindowOperator, schema_behind
from statelog.windows.panes import RowGroup
from statelog.windows.processor import TimeWindow

SESSIONS_STATE: Final = "window.sessions"
END_FIELD: Final = "session_end_ms"
"""The end of the session; it precedes the accumulator's fields in the stored session."""

Row = tuple[Any, ...]


@dataclass
class _Session:
    """A session in the making: stored sessions that meet, and new rows."""

    start_ms: int
    end_ms: int
    stored: list[tuple[int, int, Row]] = field(default_factory=list)
    """Start, end and accumulator of each."""
    groups: list[RowGroup] = field(default_factory=list)


class SessionWindowOperator(WindowOperator):
    """Stores an accumulator per session, and merges sessions that meet."""

    def __init__(self, gap_ms: int, contents: Contents, clock: Clock, codecs: ProcessorCodecs) -> None:
        super().__init__(contents, clock, codecs)
        self._gap_ms = gap_ms
        self._schema = schema_behind(END_FIELD, contents)

    def init(self, handle: Any) -> None:
        self._sessions = handle.getMapState(SESSIONS_STATE, "start_ms long", self._schema)
        super().init(handle)

    def handleInputRows(self, key: Row, rows: Iterator[RowGroup], timerValues: Any) -> Iterator[Any]:
        before_ms = self._clock.before_ms(timerValues)
        closed_ms = self.closed_ms(before_ms)
        groups = list(self._timed(rows, timerValues))
        if groups[-1].first_ms is None:
            yield from self._late(groups.pop())
        stored = [(start, row[0], tuple(row[1:])) for (start,), row in self._sessions.iterator()]
        sessions = self._merged(self._without_closed(stored, closed_ms), groups)
        timers: set[int] = set()
        for session in sessions:
            if not session.stored and session.end_ms <= closed_ms:
                for group in session.groups:
                    yield from self._late(group)
                continue
            if not session.groups:
                continue
            held = self._write(session)
            is_over = session.end_ms <= before_ms
            if all(end != session.end_ms for _, end, _ in session.stored):
                timers.add(session.end_ms + self._lateness_ms if is_over else session.end_ms)
            if is_over:
                window = TimeWindow(session.start_ms, session.end_ms)
                yield from self._contents.results(key, window, [held], self._context(timerValues, is_update=True))
        # A timer deleted here may also be due for the removal of another session. The next timer of the merged session
        # does that removal.
        for timer_ms in {end for _, end, _ in stored if end > before_ms} - {session.end_ms for session in sessions}:
            self._handle.deleteTimer(timer_ms)
        for timer_ms in timers:
            self._handle.registerTimer(timer_ms)

    def _without_closed(self, stored: list[tuple[int, int, Row]], closed_ms: int) -> list[tuple[int, int, Row]]:
        """Remove closed sessions that a start with a longer lateness has left; returns the others."""
        closed = [(start, end) for start, end, _ in stored if end <= closed_ms]
        for start, end in closed:
            self._remove(start, end, is_last=len(closed) == len(stored))
        return [session for session in stored if session[1] > closed_ms] if closed else stored

    def _merged(self, stored: list[tuple[int, int, Row]], groups: list[RowGroup]) -> list[_Session]:
        """Merge the stored sessions and the new rows where they meet."""
        parts = [_Session(start, end, stored=[(start, end, held)]) for start, end, held in stored]
        for group in groups:
            assert group.first_ms is not None
            assert group.last_ms is not None
            parts.append(_Session(group.first_ms, group.last_ms + self._gap_ms, groups=[group]))
        parts.sort(key=lambda part: part.start_ms)
        merged: list[_Session] = []
        for part in parts:
            if merged and part.start_ms <= merged[-1].end_ms:
                last = merged[-1]
                last.end_ms = max(last.end_ms, part.end_ms)
                last.stored += part.stored
                last.groups += part.groups
            else:
                merged.append(part)
        return merged

    def _write(self, session: _Session) -> Row:
        """Store a session in place of the sessions merged into it; returns its accumulator."""
        accumulators = [held for _, _, held in session.stored]
        held = reduce(self._contents.merged, accumulators) if accumulators else None
        for group in session.groups:
            held = self._contents.added(group, held)
        assert held is not None
        for start, _, _ in session.stored:
            if start != session.start_ms:
                self._sessions.removeKey((start,))
        self._sessions.updateValue((session.start_ms,), (session.end_ms, *held))
        return held

    def handleExpiredTimer(self, key: Row, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Return the session that ends now, and remove those whose lateness is over.

        The timer may come from a start that allowed another lateness: then its session waits for the next timer.
        """
        due_ms: int = expiredTimerInfo.getExpiryTimeInMs()
        closed_ms = self.closed_ms(self._clock.now_ms(timerValues))
        sessions = list(self._sessions.iterator())
        for (start,), row in sessions:
            end = row[0]
            if end == due_ms:
                window = TimeWindow(start, end)
                yield from self._contents.results(key, window, [tuple(row[1:])], self._context(timerValues))
            if end > due_ms:
                continue  # it has a timer of its own
            if end <= closed_ms:
                self._remove(start, end, is_last=len(sessions) == 1)
            else:
                self._handle.registerTimer(end + self._lateness_ms)

    def _remove(self, start_ms: int, end_ms: int, *, is_last: bool) -> None:
        if is_last:
            self._sessions.clear()
            self._contents.clear()
        else:
            self._sessions.removeKey((start_ms,))
            self._contents.remove(start_ms, end_ms)
