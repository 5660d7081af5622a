"""What is told of a soak: counters, as one line of JSON from time to time, and a failure with what repeats it."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

_EVERY_S: Final = 30.0


class Difference(Exception):
    """Something is not as the model has it."""


def live_on(go_on: Callable[[], bool], where: Callable[[], str], close: Callable[[], None]) -> None:
    """Continue with a life until that returns False, then close its processes.

    Raises
    ------
    Difference
        If something is not as the model has it, or whatever else goes wrong; it says where.
    """
    try:
        while go_on():
            pass
    except Difference:
        raise
    except Exception as error:
        raise Difference(f"{where()}: {type(error).__name__}: {error}") from error
    finally:
        close()


class AnyLife(Protocol):
    """A life of either lane: what it has done last, and where its files are."""

    moves: deque[str]
    directory: Path

    def run(self) -> None:
        """Live to the end; raises a Difference."""
        ...


class Report:
    """The counters of a lane.

    Parameters
    ----------
    lane : str
        Its name.
    seed : int
        That of the soak.
    mood : str
        That of all runs; empty if each has its own.
    sink : TextIO
        Where lines go.

    Attributes
    ----------
    counts : Counter
        What has happened how often.
    busy_s : float
        How long lives have taken.
    """

    def __init__(self, lane: str, seed: int, mood: str = "", sink: TextIO = sys.stdout) -> None:
        self.counts: Counter[str] = Counter()
        self.busy_s = 0.0
        self._lane = lane
        self._seed = seed
        self._mood = mood
        self._sink = sink
        self._told_s = 0.0
        self.tell("begins")

    def live(self, life: AnyLife, number: int) -> bool:
        """Run a life; return whether all was right, and tell what was not."""
        started_s, keeps = time.monotonic(), False
        try:
            life.run()
        except Difference as difference:
            keeps = True
            text = "\n    ".join([f"life {number} of seed {self._seed}, its last moves:", *life.moves, str(difference)])
            print(text, file=self._sink)
            self.tell("failed", life=number, kept=str(life.directory))
            again = f"./dev soak --lane {self._lane} --seed {self._seed} --life {number}" + (
                f" --mood {self._mood}" if self._mood else ""
            )
            print(f"repeat it with: {again}", file=self._sink, flush=True)
            return False
        finally:
            self.busy_s += time.monotonic() - started_s
            if not keeps:
                shutil.rmtree(life.directory, ignore_errors=True)
        if self.busy_s - self._told_s >= _EVERY_S:
            self.tell("running")
        return True

    def tell(self, state: str, **more: Any) -> None:
        """Print the counters."""
        self._told_s = self.busy_s
        kills = sum(count for name, count in self.counts.items() if name.startswith("kills of "))
        head = {"soak": state, "lane": self._lane, "seed": self._seed, "seconds": round(self.busy_s), **more}
        print(json.dumps({**head, "kills": kills, **dict(sorted(self.counts.items()))}), file=self._sink, flush=True)
