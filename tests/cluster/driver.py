"""The driver's program: runs the query until a file says stop, and starts it again when it fails.

What happens is written into its folder: failures as lines of JSON, the hosts of the executors now and then, and each
output. Its exit code is 0 after a stop, and 3 after an error that a start does not help against.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import statelog
from tests.cluster.totals import make_query

_POLL_S: Final = 0.2
_PAUSE_S: Final = 1.0
_TRIGGER: Final = "1 second"


class Program:
    """One run of the program."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._folder = Path(arguments["folder"])
        self._session = (
            SparkSession.builder.master(arguments["master"])
            .appName("statelog-cluster")
            .config(map=arguments["settings"])
            .getOrCreate()
        )

    def run(self) -> int:
        """Run the query; return the exit code."""
        while True:
            query = self._start()
            while query.isActive:
                self._note_executors()
                if Path(self._folder, "stop").exists():
                    query.stop()
                    self._session.stop()
                    return 0
                time.sleep(_POLL_S)
            if not self._note_failure(query):
                return 3
            time.sleep(_PAUSE_S)

    def _start(self) -> StreamingQuery:
        place = (self._arguments[name] for name in ("location", "parallelism", "broker"))
        df = make_query(self._session, *place)
        return (
            df.writeStream.outputMode("update")
            .foreachBatch(self._save)
            .option("checkpointLocation", self._arguments["checkpoint"])
            .trigger(processingTime=_TRIGGER)
            .start()
        )

    def _save(self, df: DataFrame, batch: int) -> None:
        self._write(f"output-{batch}.json", sorted([list(row) for row in df.collect()]))

    def _note_executors(self) -> None:
        context: Any = self._session.sparkContext
        driver = self._arguments["settings"]["spark.driver.host"]
        hosts = [info.host() for info in context._jsc.sc().statusTracker().getExecutorInfos()]
        self._write("executors.json", sorted(host for host in hosts if host != driver))

    def _note_failure(self, query: StreamingQuery) -> bool:
        """Write down why the query has ended; return whether it may be started again."""
        error = statelog.error_of(query)
        failure = query.exception()
        event = {
            "at_s": time.time(),
            "class": type(error).__name__ if error else "",
            "kind": str(error.kind) if error else "",
            "text": str(error or failure)[:3000],
        }
        with Path(self._folder, "failures.jsonl").open("a") as sink:
            sink.write(json.dumps(event) + "\n")
        return not isinstance(error, statelog.FencedError)

    def _write(self, name: str, value: Any) -> None:
        temporary = Path(self._folder, f"{name}.tmp")
        temporary.write_text(json.dumps(value))
        temporary.rename(self._folder / name)


def main() -> None:
    """Run; nothing of it may outlive a failure."""
    try:
        code = Program(json.loads(sys.argv[1])).run()
    except (Exception, StreamingQueryException):
        traceback.print_exc()
        code = 4
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
