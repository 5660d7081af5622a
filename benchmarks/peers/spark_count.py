"""The count by key on statelog and on Spark: a query that reads a folder's files, and writes each batch's counts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import statelog
from benchmarks.peers.programs import AGGREGATE, ROWS
from benchmarks.processors import Count
from benchmarks.query import Side


@dataclass(frozen=True, kw_only=True)
class FileCount(Side):
    """Counts the lines of files; a batch's counts are CSV files in a folder of its own."""

    source: Path
    output: Path
    files_per_batch: int

    def measure(self, directory: Path) -> dict[str, Any]:
        """Start or continue the query, and return at the end of the input."""
        session = self.session(directory)
        lines = session.readStream.schema("key string").option("maxFilesPerTrigger", self.files_per_batch)
        writer = self._counts(lines.text(str(self.source))).writeStream.outputMode("update").foreachBatch(self._write)
        query = writer.trigger(availableNow=True).option("checkpointLocation", f"{directory}/checkpoint").start()
        query.awaitTermination()
        return {}

    def _counts(self, lines: DataFrame) -> DataFrame:
        if self.side == ROWS:
            return self.transform(lines, Count(), "key string, n long", statelog.Options())
        if self.side == AGGREGATE:
            return statelog.key_by(lines, "key", parallelism=self.parallelism).agg(n=statelog.Count())
        return lines.groupBy("key").agg(F.count("*").alias("n"))

    def _write(self, batch: DataFrame, number: int) -> None:
        batch.write.csv(f"{self.output}/{number}", mode="overwrite")


def main() -> None:
    side, source, output, checkpoint, parallelism, files_per_batch = sys.argv[1:]
    FileCount(
        side=side,
        source=Path(source),
        output=Path(output),
        parallelism=int(parallelism),
        files_per_batch=int(files_per_batch),
    ).measure(Path(checkpoint))


if __name__ == "__main__":
    main()
