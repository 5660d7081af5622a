"""Kills the job again and again, and compares what each target holds in the end with a computation of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from examples.processes import JobFailedError, kill_session, open_session
from examples.sinks.job import AFTER, BEFORE, COMMITTING, PAUSED, STARTING, expected_totals, sign_of
from examples.sinks.server import PostgresServer
from examples.sinks.targets import TARGETS, Target, Total

__all__ = ["Death", "Outcome", "SinkOutcome", "add_payments", "differences", "open_address", "survive"]

_FILES_PER_LIFE: Final = 3
"""Each source has at least so many new ones in a life: enough for the commits at which the job pauses."""
_PAYMENTS_PER_FILE: Final = 40
_ACCOUNTS: Final = 15
_FIRST_FILE_S: Final = 1_000_000_000
_LATER_S: Final = 1.5
"""A death at any moment is at most so long after the moment that the job has told of."""
_POLL_S: Final = 0.02
_SILENCE_LIMIT_S: Final = 180.0


class Death(StrEnum):
    """Where the job is when it is killed."""

    STARTING = "while its queries start"
    BEFORE = "before the sink's commit"
    AFTER = "between the sink's commit and Spark's"
    ANYWHERE = "at any moment"


@dataclass(frozen=True)
class SinkOutcome:
    """The outcome for one sink.

    Parameters
    ----------
    batches : int
        Batches that Spark has committed.
    ahead : int
        Deaths after which the target had a batch that Spark had not committed.
    differences : list of str
        A line per row that the target lacks or has too often.
    """

    batches: int
    ahead: int
    differences: list[str]


@dataclass(frozen=True)
class Outcome:
    """The outcome for all sinks.

    Parameters
    ----------
    kills : Counter of Death
        The deaths that the job has died.
    rows : int
        Rows that each target must hold.
    sinks : dict of str to SinkOutcome
        The outcome for each sink.
    """

    kills: Counter[Death]
    rows: int
    sinks: dict[str, SinkOutcome]


def survive(
    sinks: Sequence[str], directory: Path, kills: int, seed: int, on_kill: Callable[[Death], None] = lambda _: None
) -> Outcome:
    """Run the job with some sinks, kill it `kills` times with its JVM and workers, let it end, and compare.

    Parameters
    ----------
    sinks : sequence of str
        Of :data:`~examples.sinks.targets.TARGETS`. Each has a query of its own in the job, and every kill hits all.
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
    ahead: Counter[str] = Counter()
    payments, checkpoints, added = directory / "payments", directory / "checkpoints", 0
    with ExitStack() as stack:
        addresses = {sink: stack.enter_context(open_address(sink, directory / f"target-{sink}")) for sink in sinks}
        targets = {sink: TARGETS[sink](address) for sink, address in addresses.items()}
        for target in targets.values():
            target.create()
        for life in range(kills + 1):
            signs = directory / f"life-{life}"
            signs.mkdir()
            files = max(_files_seen(checkpoints / sink) for sink in sinks) + _FILES_PER_LIFE
            add_payments(payments, files - added, rng)
            added = files
            command = ["examples.sinks.job", "--payments", str(payments), "--checkpoint", str(checkpoints)]
            command += ["--signs", str(signs), "--parallelism", str(rng.randrange(1, 4))]
            for sink, address in addresses.items():
                command += ["--target", sink, address]
            death = rng.choice(list(Death)) if life < kills else None
            _live(command, death, directory, sinks, signs, rng)
            if death is not None:
                died[death] += 1
                ahead.update(sink for sink in sinks if _is_ahead(targets[sink], checkpoints / sink))
                on_kill(death)
        expected = expected_totals(payments)
        found = {
            sink: SinkOutcome(
                _newest_committed(checkpoints / sink) + 1, ahead[sink], differences(targets[sink].rows(), expected)
            )
            for sink in sinks
        }
        return Outcome(died, len(expected), found)


def _newest_committed(checkpoint: Path) -> int:
    """The newest batch that Spark has committed; -1 if there is none."""
    return _newest(checkpoint / "commits")


def _files_seen(checkpoint: Path) -> int:
    """How many files the source has noted, one at a time. A batch reads several of them after some deaths."""
    return _newest(checkpoint / "sources" / "0") + 1


def _newest(log: Path) -> int:
    return max((int(path.stem) for path in log.glob("[0-9]*")), default=-1)


def _is_ahead(target: Target, checkpoint: Path) -> bool:
    """Whether a target has a batch that Spark has not committed."""
    if not (metadata := checkpoint / "metadata").exists():
        return False
    query = json.loads(metadata.read_text())["id"]
    return target.newest_batch(query) > _newest_committed(checkpoint)


def _live(
    command: list[str],
    death: Death | None,
    directory: Path,
    sinks: Sequence[str],
    signs: Path,
    rng: random.Random,
) -> None:
    """One life of the job: up to its death, or to the end of the input."""
    if death is None:
        command = [*command, "--until-end"]
    if death in (Death.BEFORE, Death.AFTER):
        side = BEFORE if death is Death.BEFORE else AFTER
        command = [*command, "--pause", side, "--at-commit", str(rng.randrange(1, _FILES_PER_LIFE))]
    with open_session(command, directory, directory / "job.log") as process:
        match death:
            case Death.STARTING | Death.ANYWHERE:
                sign = STARTING if death is Death.STARTING else COMMITTING
                _await(sign_of(signs, rng.choice(sinks), sign), process)
                time.sleep(rng.uniform(0, _LATER_S))
            case Death.BEFORE | Death.AFTER:
                for sink in sinks:
                    _await(sign_of(signs, sink, PAUSED), process)
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
