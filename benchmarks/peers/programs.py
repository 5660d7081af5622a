"""The sides' programs, and their lives: a start, the counts that they write while they run, and a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.child import failure, kill_session
from benchmarks.peers.files import Counts
from benchmarks.restarts import own_temporary_files
from benchmarks.usage import Usage

ROWS: Final = "statelog, rows"
AGGREGATE: Final = "statelog, agg"
GROUP_BY: Final = "Spark groupBy"
BYTEWAX: Final = "Bytewax"
PATHWAY: Final = "Pathway"
PYFLINK: Final = "PyFlink, Python state"
PYFLINK_SQL: Final = "PyFlink, SQL"
SIDES: Final = (ROWS, AGGREGATE, GROUP_BY, BYTEWAX, PATHWAY, PYFLINK_SQL, PYFLINK)
SLOW: Final = (BYTEWAX, PYFLINK)
"""Their input is shorter."""
PEERS: Final = frozenset({BYTEWAX, PATHWAY, PYFLINK_SQL, PYFLINK})
"""They have environments of their own."""

_ROOT: Final = Path(__file__).resolve().parents[2]
_ENVIRONMENTS: Final = _ROOT / ".venv" / "peers"
_ENVIRONMENT_OF: Final = {BYTEWAX: "bytewax", PATHWAY: "pathway", PYFLINK: "pyflink", PYFLINK_SQL: "pyflink"}
_POLL_S: Final = 0.1
_SETTLED_S: Final = 10
_SILENCE_S: Final = 900
"""A program that has written nothing for so long hangs, or has nothing to do."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program that counts lines by key, and continues from its checkpoint if there is one."""

    side: str
    command: Sequence[str]
    """Up to the paths of its input, its output and its checkpoint."""
    arguments: Sequence[str]
    """Those that follow the paths."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that differ from those of this process."""
    numbers_per_line: int = 2
    """A key, its count, and others."""
    settled_s: float | None = None
    """If it waits for more at the end of the input: it is over when all is counted, and nothing written for so long."""

    @property
    def is_installed(self) -> bool:
        """Whether there is an interpreter with its packages."""
        return Path(self.command[0]).exists()


def program_of(side: str, parallelism: int, files_per_batch: int, checkpoint_s: float) -> Program:
    """The program of a side."""
    subtasks, interval_s = str(parallelism), str(checkpoint_s)
    if side not in PEERS:
        path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        return Program(
            side=side,
            command=[sys.executable, "-m", "benchmarks.peers.spark_count", side],
            arguments=[subtasks, str(files_per_batch)],
            environment={"PYTHONPATH": path, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
        )

    def command(script: str) -> list[str]:
        # Without the script's folder, whose modules have common names
        return [f"{_ENVIRONMENTS / _ENVIRONMENT_OF[side]}/bin/python", "-P", str(Path(__file__).with_name(script))]

    own = {"PYTHONPATH": None}
    if side == BYTEWAX:
        script = command("bytewax_count.py")
        return Program(side=side, command=script, arguments=[subtasks, interval_s], environment=own)
    if side == PATHWAY:
        return Program(
            side=side,
            command=command("pathway_count.py"),
            arguments=[interval_s],
            environment={**own, "PATHWAY_THREADS": subtasks},
            numbers_per_line=4,
            settled_s=_SETTLED_S,
        )
    # Python within the JVM looks for packages there, not where the interpreter of the environment does.
    packages = map(str, (_ENVIRONMENTS / _ENVIRONMENT_OF[side]).glob("lib/python*/site-packages"))
    return Program(
        side=side,
        command=[*command("flink_count.py"), "sql" if side == PYFLINK_SQL else "python"],
        arguments=[subtasks, interval_s],
        environment={"PYTHONPATH": next(packages, None)},
    )


@dataclass(frozen=True)
class Sample:
    """How far a program was when it had written something."""

    s: float
    """Since its start."""
    rows: int
    cpu_s: float
    """Of all its processes."""


@dataclass(frozen=True)
class Life:
    """What a program has written until it was killed, or had ended."""

    counts: Counts
    samples: list[Sample]
    was_killed: bool


def live(program: Program, work: Path, counts: Counts, is_over: Callable[[float], bool]) -> Life:
    """Run a program until it ends, or kill it with all its processes once `is_over` or it is silent for too long.

    It reads ``input`` in its working folder, and writes the counts and ``checkpoint``. `is_over` is given for how many
    seconds nothing was written. A failure of the program is a click.ClickException.
    """
    command = [*program.command, f"{work}/input", f"{counts.folder}", f"{work}/checkpoint", *program.arguments]
    variables = {**os.environ, **own_temporary_files(work), **program.environment}
    log = work / f"{counts.folder.name}.log"
    samples: list[Sample] = []
    with log.open("wb") as output:
        started_s = written_s = time.monotonic()
        child = subprocess.Popen(
            command,
            env={name: value for name, value in variables.items() if value is not None},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            used = Usage(child.pid)
            while True:
                has_ended = child.poll() is not None
                used.look()
                now_s = time.monotonic()
                if counts.look():
                    written_s = now_s
                    samples.append(Sample(now_s - started_s, counts.rows, used.total()["cpu_s"]))
                silent_s = now_s - written_s
                if has_ended or is_over(silent_s) or silent_s > _SILENCE_S:
                    break
                time.sleep(_POLL_S)
        finally:
            kill_session(child)
            code = child.wait()
    if has_ended and code != 0:
        raise failure(program.side, code, log)
    counts.look()
    return Life(counts, samples, not has_ended)
