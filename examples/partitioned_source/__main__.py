"""Read four partitions with 2, then 1, then 4 subtasks, show who owns what, and check what was read."""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import click
from pyspark.sql import DataFrame, SparkSession

from examples.partitioned_source.source import RECORD_SCHEMA, read_partitions

PARTITIONS = ("KP1", "KP2", "KP3", "KP4")
PARALLELISM = (2, 1, 4)


class Demo:
    """The partitions, the ticks and the output in a directory.

    Parameters
    ----------
    directory : Path
        An empty directory.
    lines, max_lines : int
        Lines per partition, and how many of them a batch reads.
    """

    def __init__(self, directory: Path, lines: int, max_lines: int) -> None:
        self._directory = directory
        self._lines = lines
        self._max_lines = max_lines
        for folder in ("partitions", "ticks", "output"):
            (directory / folder).mkdir()
        for partition in PARTITIONS:
            text = "".join(f"record {number} of {partition}\n" for number in range(lines))
            (directory / "partitions" / partition).write_text(text)
        self._spark = (
            SparkSession.builder.master("local[2]")
            .appName("partitioned source")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.log.level", "ERROR")
            .getOrCreate()
        )

    def run(self, parallelism: int, batches: int) -> None:
        """Run the query for some batches, from where it stopped."""
        ticks = self._directory / "ticks"
        for _ in range(batches):
            (ticks / f"{len(list(ticks.iterdir())):06}.txt").write_text("tick\n")
        stream = self._spark.readStream.option("maxFilesPerTrigger", 1).text(str(ticks))
        records = read_partitions(stream, str(self._directory / "partitions"), self._max_lines, parallelism)
        writer = records.writeStream.format("parquet").option("path", str(self._directory / "output"))
        writer = writer.option("checkpointLocation", str(self._directory / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    def print_owners(self, parallelism: int) -> None:
        """Print which partitions each subtask read in the last batch."""
        rows = self._output().where("batch = (SELECT max(batch) FROM records)").select("subtask", "partition")
        owned = defaultdict(set)
        for subtask, partition in rows.distinct().collect():
            owned[subtask].add(partition)
        click.echo(f"parallelism {parallelism}")
        for subtask in range(parallelism):
            click.echo(f"  S{subtask + 1}: {', '.join(sorted(owned[subtask])) or 'nothing'}")

    def differences(self) -> list[str]:
        """Compare what was read with the files; one line per partition that differs."""
        found = defaultdict(list)
        for _, _, partition, offset, record in self._output().orderBy("partition", "offset").collect():
            found[partition].append((offset, record))
        return [
            f"{partition}: {len(found[partition])} records read of {self._lines}"
            for partition in PARTITIONS
            if found[partition] != [(number, f"record {number} of {partition}") for number in range(self._lines)]
        ]

    def _output(self) -> DataFrame:
        output = self._spark.read.schema(RECORD_SCHEMA).parquet(str(self._directory / "output"))
        output.createOrReplaceTempView("records")
        return output

    def stop(self) -> None:
        """End Spark."""
        self._spark.stop()


@click.command()
@click.option("--lines", type=click.IntRange(1), default=60, show_default=True, help="Lines per partition.")
@click.option("--max-lines", type=click.IntRange(1), default=10, show_default=True, help="Lines that a batch reads.")
def main(lines: int, max_lines: int) -> None:
    """Read four partitions, and rescale the source twice; the exit code is 0 if every record was read once."""
    batches = -(-lines // max_lines)
    if batches < len(PARALLELISM):
        raise click.UsageError(f"{batches} batches are too few for {len(PARALLELISM)} runs.")
    with tempfile.TemporaryDirectory(prefix="statelog-source-") as directory:
        demo = Demo(Path(directory), lines, max_lines)
        for leg, parallelism in enumerate(PARALLELISM):
            # The last run reads what the others have left.
            demo.run(parallelism, batches // len(PARALLELISM) + (batches % len(PARALLELISM) if leg == 2 else 0))
            demo.print_owners(parallelism)
        differences = demo.differences()
        demo.stop()
    click.echo("\n".join(differences) or f"{lines * len(PARTITIONS)} records, each read exactly once")
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
