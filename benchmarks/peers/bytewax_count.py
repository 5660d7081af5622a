"""The count by key on Bytewax: as many processes as subtasks, since the workers of one process share a lock."""

import socket
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
from bytewax.connectors.files import DirSource
from bytewax.dataflow import Dataflow
from bytewax.operators import StatefulBatchLogic
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.run import cli_main


class Count(StatefulBatchLogic):
    """The number of rows that a key has had."""

    def __init__(self, n: int | None) -> None:
        self._n = n or 0

    def on_batch(self, values: list[None]) -> tuple[list[int], bool]:
        self._n += len(values)
        return [self._n], StatefulBatchLogic.RETAIN

    def snapshot(self) -> int:
        return self._n


class LinesPartition(StatelessSinkPartition):
    """Appends lines to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def write_batch(self, items: list[tuple[str, int]]) -> None:
        self._file.writelines(f"{key},{n}\n" for key, n in items)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class LinesSink(DynamicSink):
    """A file of lines for each worker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def build(self, step_id: str, worker_index: int, worker_count: int) -> LinesPartition:
        return LinesPartition(self._folder / str(worker_index))


def make_flow(source: Path, output: Path) -> Dataflow:
    flow = Dataflow("count")
    lines = op.input("lines", flow, DirSource(source))
    keyed: Any = op.flat_map_batch("key", lines, lambda batch: [(line, None) for line in batch])
    op.output("output", op.stateful_batch("count", keyed, Count), LinesSink(output))
    return flow


def main() -> None:
    source, output, checkpoint, parallelism, checkpoint_s, *process = sys.argv[1:]
    if process:
        number, *addresses = process
        cli_main(
            make_flow(Path(source), Path(output)),
            process_id=int(number),
            addresses=addresses,
            epoch_interval=timedelta(seconds=float(checkpoint_s)),
            recovery_config=RecoveryConfig(Path(checkpoint)),
        )
        return
    if not Path(checkpoint).exists():
        Path(checkpoint).mkdir()
        init_db_dir(Path(checkpoint), int(parallelism))
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(int(parallelism))]
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    command = [sys.executable, *sys.orig_argv[1:]]
    processes = [subprocess.Popen([*command, str(number), *addresses]) for number in range(int(parallelism))]
    sys.exit(max(process.wait() for process in processes))


if __name__ == "__main__":
    main()
