"""An object in a process of its own, which may be killed at any moment."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Final, NoReturn

from statelog.errors import ErrorKind, StatelogError
from tests.storage.full_disk import FULL

TIMEOUT_S: Final = 120.0
"""For one answer of a process; all that they do takes some milliseconds."""


class Failed(Exception):
    """A call has failed; `kind` is that of statelog's error, and empty for others."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text

    @property
    def is_lost(self) -> bool:
        """Whether the driver could not be reached."""
        return self.kind == ErrorKind.RPC

    @property
    def is_injected(self) -> bool:
        """Whether a fault of the store or a full disk explains it."""
        return "injected fault" in self.text or FULL in self.text

    def __str__(self) -> str:
        return self.text


class Died(Exception):
    """A process was killed."""


class Hangs(Exception):
    """A process does not answer."""


class Remote:
    """A fork that makes an object and calls its methods.

    Parameters
    ----------
    make : callable
        Makes the object, in the fork.
    """

    def __init__(self, make: Callable[[], object]) -> None:
        self.connection, other_end = Pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self.connection.close()
            _serve_and_exit(make, other_end, parent)
        other_end.close()

    def ask(self, method: str, *arguments: Any) -> None:
        """Begin a call; a process that is gone does not get it."""
        with suppress(OSError):
            self.connection.send((method, arguments))

    def answer(self) -> Any:
        """What the call has returned.

        Raises
        ------
        Died, Failed, Hangs
            As they say.
        """
        try:
            if not self.connection.poll(TIMEOUT_S):
                raise Hangs(f"process {self.pid} does not answer within {TIMEOUT_S} s")
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            status = self.end()
            if status == -signal.SIGKILL:
                raise Died from None
            raise Failed("", f"a process ended by itself with {status}") from None
        if isinstance(answer, Failed):
            raise answer
        return answer

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method."""
        self.ask(method, *arguments)
        return self.answer()

    def kill(self) -> None:
        """Send SIGKILL; whoever waits for an answer finds out."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def is_dead(self, within_s: float) -> bool:
        """Whether the process ends within some seconds, by itself or by a kill that is on its way."""
        end_s = time.monotonic() + within_s
        while self.pid:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
            if time.monotonic() > end_s:
                return False
            time.sleep(0.002)
        return True

    def end(self) -> int:
        """Kill it if it has not ended, and return its status."""
        if not self.pid:
            return 0
        os.kill(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        self.connection.close()
        return status


def first_answer(remotes: list[Remote], timeout_s: float) -> Remote | None:
    """The first of several processes that has something to say, or has died; None if that takes too long."""
    ready = wait([remote.connection for remote in remotes], timeout_s)
    return next((remote for remote in remotes if remote.connection in ready), None)


def _serve_and_exit(make: Callable[[], object], connection: Connection, parent: int) -> NoReturn:
    """Run the whole life of a fork: nothing of what the parent would do at its end may happen here."""
    try:
        served = make()
        while True:
            while not connection.poll(1.0):
                if os.getppid() != parent:
                    os._exit(0)
            method, arguments = connection.recv()
            try:
                answer = getattr(served, method)(*arguments)
            except Exception as error:
                kind = str(error.kind) if isinstance(error, StatelogError) else ""
                answer = Failed(kind, traceback.format_exc())
            connection.send(answer)
    except BaseException:
        with suppress(OSError):
            connection.send(Failed("", traceback.format_exc()))
    finally:
        os._exit(1)
