"""An operator that reads partitioned files as a Kafka source reads topics."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pyspark.sql import DataFrame, Row

import statelog

__all__ = ["RECORD_SCHEMA", "PartitionSource", "read_partitions"]

RECORD_SCHEMA = "batch long, subtask long, partition string, offset long, record string"


class PartitionSource(statelog.OperatorProcessor):
    """Reads some lines of every partition that the subtask owns.

    Each (partition, offset) is an element of the state of its own, so that it can move to another subtask.

    Parameters
    ----------
    folder : str
        Holds a file per partition, to which lines may be added.
    max_lines : int
        How many lines of a partition are read in a batch.
    """

    def __init__(self, folder: str, max_lines: int) -> None:
        self._folder = Path(folder)
        self._max_lines = max_lines

    def init(self, handle: statelog.OperatorHandle) -> None:
        self.units = handle.getListState("units", "partition string, offset long")

    def process(self, rows: Iterator[Row], context: statelog.OperatorContext) -> Iterator[Row]:
        # The rows only say that it is time to read. Partitions are found once; later their owners are in the state.
        units = self._discovered(context) if context.batchId == 0 else list(self.units.get())
        for index, (partition, offset) in enumerate(units):
            with (self._folder / partition).open() as lines:
                found = [line.rstrip("\n") for line in islice(lines, offset, offset + self._max_lines)]
            for number, record in enumerate(found, offset):
                yield Row(
                    batch=context.batchId,
                    subtask=context.subtaskIndex,
                    partition=partition,
                    offset=number,
                    record=record,
                )
            units[index] = (partition, offset + len(found))
        self.units.update(units)

    def _discovered(self, context: statelog.OperatorContext) -> list[tuple[str, int]]:
        names = sorted(path.name for path in self._folder.iterdir())
        first, end = ((context.subtaskIndex + side) * len(names) // context.parallelism for side in (0, 1))
        return [(name, 0) for name in names[first:end]]


def read_partitions(ticks: DataFrame, folder: str, max_lines: int, parallelism: int) -> DataFrame:
    """The records of all partitions; `ticks` is any stream, which decides when there is a batch."""
    return statelog.process(ticks, PartitionSource(folder, max_lines), RECORD_SCHEMA, parallelism=parallelism)
