"""Session windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from statelog.convert.codecs import ProcessorCodecs
from statelog.history.window_settings import SESSION_END_FIELD, SESSIONS_STATE
from statelog.windows.accumulators import Contents
from statelog.windows.operator import Clock, WindowOperator, schema_behind
from statelog.windows.panes import RowGroup

Row = tuple[Any, ...]


@dataclass
class _Session:
    """A session in the making: new rows, and the stored sessions that they meet."""

    start_ms: int
    end_ms: int
    groups: list[RowGroup] = field(default_factory=list)
    stored: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of each."""
    held: Row | None = None
    """The merged accumulators of the stored sessions."""


class SessionWindowOperator(WindowOperator):
    """Stores an accumulator per session, and merges sessions that meet.

    The sessions of a key never meet, so in order of their starts they are in order of their ends, too. Only sessions
    that are near new rows or due are read.
    """

    def __init__(self, gap_ms: int, contents: Contents, clock: Clock, codecs: ProcessorCodecs) -> None:
        super().__init__(contents, clock, codecs)
        self._gap_ms = gap_ms
        self._schema = schema_behind(SESSION_END_FIELD, contents.schema)

    def init(self, handle: Any) -> None:
        self._sessions = handle.getTimeline(SESSIONS_STATE, "start_ms long", self._schema)
        self._timers = handle.timers
        super().init(handle)

    def handleInputRows(self, key: Row, rows: Iterator[RowGroup], timerValues: Any) -> Iterator[Any]:
        times = self.times(timerValues)
        groups = list(self._timed(rows, timerValues))
        if groups[-1].first_ms is None:
            yield from self._late(groups.pop())
        ended: set[int] = set()
        timers: set[int] = set()
        for session in self._merged(groups, times.closed_before_ms):
            if session.held is None and session.end_ms <= times.closed_before_ms:
                for group in session.groups:
                    yield from self._late(group)
                continue
            held = self._write(session)
            is_over = session.end_ms <= times.before_ms
            ends = {end for _, end in session.stored}
            if session.end_ms not in ends:
                timers.add(session.end_ms + self._lateness_ms if is_over else session.end_ms)
            ended.update(end for end in ends if times.before_ms < end != session.end_ms)
            if is_over:
                yield from self._contents.results(key, (session.start_ms, session.end_ms), held, times.update)
        # A timer deleted here may also be due for the removal of another session. The next timer of the merged session
        # does that removal.
        for timer_ms in ended:
            self._timers.delete(timer_ms)
        for timer_ms in timers:
            self._timers.register(timer_ms)

    def _merged(self, groups: Iterable[RowGroup], closed_ms: int) -> Iterator[_Session]:
        """Merge the new rows and the stored sessions where they meet."""
        session: _Session | None = None
        for group in groups:
            assert group.first_ms is not None
            assert group.last_ms is not None
            end_ms = group.last_ms + self._gap_ms
            if session is None or group.first_ms > session.end_ms:
                if session is not None:
                    yield session
                session = _Session(group.first_ms, end_ms)
                near = self._sessions.from_last_until(group.first_ms, end_ms + 1)
            else:
                near = self._sessions.between(session.end_ms + 1, end_ms + 1)
                session.end_ms = max(session.end_ms, end_ms)
            session.groups.append(group)
            for start_ms, row in near:
                if row[0] >= group.first_ms:
                    self._take(session, start_ms, row, closed_ms)
        if session is not None:
            yield session

    def _take(self, session: _Session, start_ms: int, row: Row, closed_ms: int) -> None:
        """Merge a stored session into a new one, or remove it if it is closed: a longer lateness has left it."""
        end_ms, held = row[0], row[1:]
        if end_ms <= closed_ms:
            self._sessions.remove(start_ms)
            self._contents.remove(start_ms, end_ms)
            return
        session.start_ms, session.end_ms = min(session.start_ms, start_ms), max(session.end_ms, end_ms)
        session.stored.append((start_ms, end_ms))
        session.held = held if session.held is None else self._contents.merged(session.held, held)

    def _write(self, session: _Session) -> Row:
        """Store a session in place of the sessions merged into it; returns its accumulator."""
        held = session.held
        for group in session.groups:
            held = self._contents.added(group, held)
        assert held is not None
        for start_ms, _ in session.stored:
            if start_ms != session.start_ms:
                self._sessions.remove(start_ms)
        self._sessions.put(session.start_ms, (session.end_ms, *held))
        return held

    def handleExpiredTimer(self, key: Row, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        """Return the sessions that have ended by now, and remove those whose lateness is over.

        The sessions and the times alone decide what is due: the timer may come from a start that allowed another
        lateness.
        """
        times = self.times(timerValues)
        due_ms: int = expiredTimerInfo.getExpiryTimeInMs()
        self._timers.skip_due(times.now_ms)  # they would return the same sessions again
        for start_ms, row in self._sessions.from_last_until(due_ms - 1, times.now_ms):
            if due_ms <= row[0] <= times.now_ms:
                yield from self._contents.results(key, (start_ms, row[0]), row[1:], times.context)
        oldest_ms = self._remove_closed(times.closed_now_ms)
        # Sessions are closed one after the other, so the timer of the oldest one is enough for their removal.
        if oldest_ms is not None and oldest_ms <= times.now_ms:
            self._timers.register(oldest_ms + self._lateness_ms)

    def _remove_closed(self, closed_ms: int) -> int | None:
        """Remove the closed sessions; returns the end of the oldest of the others, None if there is none."""
        closed: list[tuple[int, int]] = []
        for start_ms, row in self._sessions.between(end_ms=closed_ms):
            if row[0] > closed_ms:
                oldest_ms: int | None = row[0]
                break
            closed.append((start_ms, row[0]))
        else:
            oldest_ms = next((row[0] for _, row in self._sessions.between(closed_ms)), None)
        if closed and oldest_ms is None:
            self._sessions.clear()
            self._contents.clear()
        elif closed:
            for start_ms, _ in closed:
                self._sessions.remove(start_ms)
            self._contents.remove(closed[0][0], closed[-1][1])
        return oldest_ms
