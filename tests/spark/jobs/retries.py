"""A driver program whose tasks have several attempts: one subtask fails after its ack, and its second attempt
gives another result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from tests.options import make_options
from tests.spark.faults import take_marker
from tests.spark.jobs.ledger import note_jvm, run_main
from tests.spark.support import Job, make_session


class ByAttempt(StatefulProcessor):
    """Adds 1 in the first attempt of a task, and 1000 in a later one."""

    def init(self, handle: Any) -> None:
        self._total = handle.getValueState("total", "total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        context = TaskContext.get()
        assert context is not None
        (total,) = self._total.get() or (0,)
        total += 1 if context.attemptNumber() == 0 else 1000
        self._total.update((total,))
        yield Row(user=key[0], total=total)

    def close(self) -> None:
        pass


def fail_after_the_end(marker: str) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Pass everything on; when all is read, and so acked, fail if the marker is there."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        if take_marker(marker):
            raise RuntimeError("the task fails after its ack")

    return run


def main(arguments: dict[str, Any]) -> None:
    """Run the query over all input that is there."""
    session = make_session(arguments["master"])
    note_jvm(session, arguments)
    job = Job(Path(arguments["root"]))
    df = job.ledger(
        session,
        arguments["parallelism"],
        make_options(**arguments["options"]),
        ByAttempt(),
        output="user string, total long",
    )
    job.run(df.mapInArrow(fail_after_the_end(arguments["marker"]), df.schema))


if __name__ == "__main__":
    run_main(main)
