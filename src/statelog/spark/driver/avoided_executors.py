"""Executors that placement gives no subtasks for a while, because local files cannot be kept on their host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from statelog.clock import Clock


@dataclass
class _Host:
    """A host where a task could not keep its local files."""

    executors: set[str]
    """The executors of these tasks."""
    avoided_s: float
    until_s: float


class AvoidedExecutors:
    """Remembers for `avoided_s` on which hosts tasks could not keep their local files.

    If that happens again after the time, the next time is twice as long, up to `longest_s`. Used from any thread.
    """

    def __init__(self, clock: Clock, avoided_s: float = 600.0, longest_s: float = 14_400.0) -> None:
        self._clock = clock
        self._avoided_s = avoided_s
        self._longest_s = longest_s
        self._hosts: dict[str, _Host] = {}
        self._lock = threading.Lock()

    def note(self, executor: str, host: str) -> float | None:
        """Note a failure on an executor, and return how long its host is avoided; None if that was known already."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            known = self._hosts.get(host)
            if known is not None and known.until_s > now_s:
                is_new = executor not in known.executors
                known.executors.add(executor)
                known.until_s = now_s + known.avoided_s
                return known.avoided_s if is_new else None
            avoided_s = self._avoided_s if known is None else min(2 * known.avoided_s, self._longest_s)
            self._hosts[host] = _Host({executor}, avoided_s, now_s + avoided_s)
            return avoided_s

    def others(self, executors: Sequence[str], hosts: Callable[[], Mapping[str, str]]) -> list[str]:
        """The executors that may have subtasks: those on hosts without a failure.

        If there are none, those without a failure of their own; if all have failed, all of them. `hosts` gives the host
        of each executor, and is called only if a host is avoided.
        """
        now_s = self._clock.monotonic_s()
        with self._lock:
            avoided = {name: set(host.executors) for name, host in self._hosts.items() if host.until_s > now_s}
        if not avoided:
            return list(executors)
        host_of = hosts()
        failed = set().union(*avoided.values())
        on_others = [one for one in executors if host_of.get(one) not in avoided and one not in failed]
        return on_others or [one for one in executors if one not in failed] or list(executors)
