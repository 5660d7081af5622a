"""Deleting what no checkpoint needs any more, beside the work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

from statelog.errors import StorageError
from statelog.storage import Store

__all__ = ["Deleter"]

_log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S: Final = 10.0


class Deleter:
    """Deletes objects, as many at a time as have come together; what could not be deleted is tried again.

    Parameters
    ----------
    store : Store
        Where they are.
    name : str
        The operator, for messages.
    in_background : bool
        Whether a thread does it; otherwise the caller waits.
    """

    def __init__(self, store: Store, name: str, *, in_background: bool) -> None:
        self._store = store
        self._name = name
        self._waiting: list[str] = []
        self._searches: list[Callable[[], list[str]]] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._in_background = in_background
        self._thread: threading.Thread | None = None
        self.deleted = 0

    def delete(self, names: Iterable[str]) -> None:
        """Have objects deleted, in this order."""
        with self._changed:
            self._waiting.extend(names)
        self._start()

    def delete_all(self, prefix: str, *, keeps: Callable[[str], bool]) -> None:
        """Have all objects deleted whose names start with a prefix, with exceptions."""
        with self._changed:
            self._searches.append(lambda: [info.name for info in self._store.list(prefix) if not keeps(info.name)])
        self._start()

    def close(self) -> None:
        """Do what is waiting, and stop; a store that hangs is not waited for long."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                _log.warning("%s: the store hangs; what is left to be deleted goes with the next start", self._name)
                return
        self._work_off()

    def _start(self) -> None:
        if not self._in_background:
            self._work_off()
            return
        with self._changed:
            if self._thread is None and (self._waiting or self._searches):
                self._thread = threading.Thread(target=self._run, name="statelog-delete", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            failed = not self._work_off()
            with self._changed:
                if self._is_closed:
                    return
                # After a failure not before there is more to do: the store may be out of order.
                if failed or not (self._waiting or self._searches):
                    self._changed.wait()

    def _work_off(self) -> bool:
        with self._changed:
            names, self._waiting = self._waiting, []
            searches, self._searches = self._searches, []
        try:
            while searches:
                names += searches[-1]()
                searches.pop()
            if names:
                self._store.delete(names)
                self.deleted += len(names)
        except StorageError as error:
            _log.warning("%s: %d objects could not be deleted yet: %s", self._name, len(names), error)
            with self._changed:
                self._waiting = names + self._waiting
                self._searches = searches + self._searches
            return False
        return True
