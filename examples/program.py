"""What the example programs share: made-up input as a stream, a query run to its end, and the picture of its result."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

import click
import pandas as pd
import xxhash
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pyspark.sql import DataFrame, SparkSession

__all__ = ["START", "Rows", "after", "draw", "main", "read_batches", "run", "write_batches"]

Rows = list[dict[str, Any]]
START: Final = datetime(2024, 5, 1, tzinfo=UTC)


def after(minutes: float) -> datetime:
    """The moment so many minutes after :data:`START`, in whole seconds."""
    return START + timedelta(seconds=round(minutes * 60))


def write_batches(folder: Path, batches: Iterable[Rows]) -> None:
    """Add a file per batch to a folder; Spark reads files in order of their times."""
    folder.mkdir(parents=True, exist_ok=True)
    for rows in batches:
        number = len(list(folder.iterdir()))
        path = folder / f"{number:06}.json"
        path.write_text("".join(json.dumps(row, default=methodcaller("isoformat")) + "\n" for row in rows))
        os.utime(path, (number + 1, number + 1))


def read_batches(spark: SparkSession, folder: Path, schema: str) -> DataFrame:
    """A folder as a stream that has one file in each batch."""
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(folder))


def run(result: DataFrame, folder: Path) -> pd.DataFrame:
    """Run a query until it has read all its input, and return the rows of all its batches so far."""
    output = folder / "output"
    output.mkdir(parents=True, exist_ok=True)

    def save(rows: DataFrame, batch: int) -> None:
        # A batch that is repeated after a crash replaces the file that it had written.
        rows.toPandas().assign(batch=batch).to_parquet(output / f"{batch:06}.parquet")

    query = result.writeStream.foreachBatch(save).option("checkpointLocation", str(folder / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    frames = [pd.read_parquet(path) for path in sorted(output.glob("*.parquet"))]
    return pd.concat([frame for frame in frames if len(frame)], ignore_index=True)


def draw(picture: Callable[[pd.DataFrame, Axes], None], result: pd.DataFrame, path: Path) -> None:
    """Draw a result into a PNG file, in which ``Result`` is a checksum of the result."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    picture(result, axes)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", dpi=100, metadata={"Result": checksum(result)}, pil_kwargs={"optimize": True})


def checksum(result: pd.DataFrame) -> str:
    """The same for equal results."""
    return xxhash.xxh3_64_hexdigest(result.to_csv(index=False).encode())


def main(
    example: Callable[[SparkSession, Path], pd.DataFrame], picture: Callable[[pd.DataFrame, Axes], None], about: str
) -> None:
    """Run an example in a folder of its own as a program, which prints the result, and draws it on request."""

    @click.command(help=about)
    @click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="PNG file that gets the picture.")
    def command(plot: Path | None) -> None:
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.log.level", "ERROR")
            .getOrCreate()
        )
        with tempfile.TemporaryDirectory(prefix="statelog-example-") as folder:
            result = example(spark, Path(folder))
            spark.stop()
        click.echo(result.to_string(max_rows=40))
        if plot is not None:
            draw(picture, result, plot)

    command()
