"""Kills the job again and again, and compares what its target holds in the end with a computation of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from examples.processes import JobFailedError, kill_session, open_session
from examples.sinks.job import AFTER, BEFORE, COMMITTING, PAUSED, expected_totals
from examples.sinks.server import PostgresServer
from examples.sinks.targets import TARGETS, Total

__all__ = ["Death", "Outcome", "add_payments", "differences", "open_address", "survive"]

_FILES_PER_LIFE: Final = 3
_PAYMENTS_PER_FILE: Final = 40
_ACCOUNTS: Final = 15
_FIRST_FILE_S: Final = 1_000_000_000
_START_S: Final = 6.0
_POLL_S: Final = 0.02
_SILENCE_LIMIT_S: Final = 180.0


class Death(StrEnum):
    """Where the job is when it is killed."""

    STARTING = "while it starts"
    BEFORE = "before the sink's commit"
    AFTER = "between the sink's commit and Spark's"
    ANYWHERE = "at any moment"


@dataclass(frozen=True)
class Outcome:
    """What has come of it.

    Parameters
    ----------
    kills : Counter of Death
        The deaths that the job has died.
    batches, rows : int
        Batches that Spark has committed; rows that the target must hold.
    differences : list of str
        A line per row that the target lacks or has too often.
    """

    kills: Counter[Death]
    batches: int
    rows: int
    differences: list[str]


def survive(
    sink: str, directory: Path, kills: int, seed: int, on_kill: Callable[[Death], None] = lambda _: None
) -> Outcome:
    """Run the job with a sink, kill it `kills` times with its JVM and workers, let it end, and compare.

    Parameters
    ----------
    sink : str
        One of :data:`~examples.sinks.targets.TARGETS`.
    directory : Path
        An empty directory. The job's output goes to ``job.log`` there.
    kills, seed : int
        How often, and what varies the deaths.
    on_kill : callable, optional
        Told of each death.

    Raises
    ------
    JobFailedError
        If the job ends by itself before it is killed, or is silent for three minutes.
    """
    rng = random.Random(seed)
    died: Counter[Death] = Counter()
    payments, checkpoint = directory / "payments", directory / "checkpoint"
    with open_address(sink, directory / "target") as address:
        target = TARGETS[sink](address)
        target.create()
        for life in range(kills + 1):
            signs = directory / f"life-{life}"
            signs.mkdir()
            add_payments(payments, _FILES_PER_LIFE, rng)
            command = ["examples.sinks.job", sink, "--address", address, "--payments", str(payments)]
            command += ["--checkpoint", str(checkpoint), "--signs", str(signs)]
            command += ["--parallelism", str(rng.randrange(1, 4))]
            death = rng.choice(list(Death)) if life < kills else None
            _live(command, death, directory, signs, rng)
            if death is not None:
                died[death] += 1
                on_kill(death)
        expected = expected_totals(payments)
        batches = len(list((checkpoint / "commits").glob("[0-9]*")))
        return Outcome(died, batches, len(expected), differences(target.rows(), expected))


def _live(command: list[str], death: Death | None, directory: Path, signs: Path, rng: random.Random) -> None:
    """One life of the job: up to its death, or to the end of the input."""
    if death is None:
        command = [*command, "--until-end"]
    if death in (Death.BEFORE, Death.AFTER):
        side = BEFORE if death is Death.BEFORE else AFTER
        command = [*command, "--pause", side, "--at-commit", str(rng.randrange(1, _FILES_PER_LIFE))]
    with open_session(command, directory, directory / "job.log") as process:
        match death:
            case Death.STARTING:
                time.sleep(rng.uniform(0, _START_S))
            case Death.BEFORE | Death.AFTER:
                _await(signs / PAUSED, process)
            case Death.ANYWHERE:
                _await(signs / COMMITTING, process)
                time.sleep(rng.uniform(0, 1.5))
            case None:
                process.wait()
        if death is not None and process.poll() is None:
            kill_session(process.pid)
            return
    if death is not None or process.returncode:
        raise JobFailedError(f"The job ended with exit code {process.returncode}.")


def _await(sign: Path, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _SILENCE_LIMIT_S
    while not sign.exists() and process.poll() is None:
        if time.monotonic() > deadline_s:
            raise JobFailedError(f"The job has not come to {sign.name} in {_SILENCE_LIMIT_S:.0f} s.")
        time.sleep(_POLL_S)


def add_payments(folder: Path, files: int, rng: random.Random) -> None:
    """Add files of payments, each whole at once, and a second newer than the one before: Spark reads them in order."""
    folder.mkdir(exist_ok=True)
    first = len(list(folder.iterdir()))
    for number in range(first, first + files):
        payments = [
            {"seq": seq, "account": f"account-{rng.randrange(_ACCOUNTS)}", "amount": rng.randrange(1, 1000)}
            for seq in range(number * _PAYMENTS_PER_FILE, (number + 1) * _PAYMENTS_PER_FILE)
        ]
        hidden = folder.parent / "payments.new"
        hidden.write_text("".join(json.dumps(payment) + "\n" for payment in payments))
        os.utime(hidden, (_FIRST_FILE_S + number, _FIRST_FILE_S + number))
        hidden.rename(folder / f"{number:06}.json")


def differences(found: list[Total], expected: list[Total]) -> list[str]:
    """A line for each row that one of two lists has more often."""
    ours, wanted = Counter(found), Counter(expected)
    missing = [f"missing: {row}" for row in (wanted - ours).elements()]
    return missing + [f"too many: {row}" for row in (ours - wanted).elements()]


@contextmanager
def open_address(sink: str, folder: Path) -> Iterator[str]:
    """Where a sink's target can be made: a database of a server that lives as long, or a folder."""
    if sink != "postgres":
        yield str(folder)
        return
    with PostgresServer() as server:
        yield server.create_database()
