"""What the processes of a session use: CPU time, and bytes written to disks."""

from __future__ import annotations

from contextlib import suppress

import psutil

from benchmarks.child import processes_of


class Usage:
    """CPU seconds and bytes written to disks, of all processes of a session since it was made; Linux only.

    The counts of a process go with it, so look from time to time: what one does after the last look is lost.
    """

    def __init__(self, session: int) -> None:
        self._session = session
        self._first: dict[tuple[int, float], tuple[float, float]] = {}
        self._last: dict[tuple[int, float], tuple[float, float]] = {}
        self.look()
        self._first = dict(self._last)

    def look(self) -> None:
        for number in processes_of(self._session):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(number)
                own = process.cpu_times()
                name = number, process.create_time()
                self._last[name] = own.user + own.system, process.io_counters().write_bytes

    def total(self) -> dict[str, float]:
        """CPU seconds and bytes from the first look to the last one."""
        used = [
            [last - first for last, first in zip(self._last[name], self._first.get(name, (0, 0)), strict=True)]
            for name in self._last
        ]
        cpu_s, written_bytes = (sum(column) for column in zip(*used, strict=True))
        return {"cpu_s": cpu_s, "written_bytes": written_bytes}
