"""The count by key on PyFlink, by a Python function with a value state or by SQL, in a cluster within the process."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyflink.common import Configuration, Types, WatermarkStrategy
from pyflink.common.serialization import Encoder
from pyflink.datastream import DataStream, KeyedProcessFunction, RuntimeContext, StreamExecutionEnvironment
from pyflink.datastream.connectors.file_system import BucketAssigner, FileSink, FileSource, RollingPolicy, StreamFormat
from pyflink.datastream.state import ValueStateDescriptor
from pyflink.table import StreamTableEnvironment


class Count(KeyedProcessFunction):
    """A value state: how many rows a key has had."""

    def open(self, runtime_context: RuntimeContext) -> None:
        self._seen = runtime_context.get_state(ValueStateDescriptor("n", Types.LONG()))

    def process_element(self, value: str, ctx: Any) -> Iterator[str]:
        n = (self._seen.value() or 0) + 1
        self._seen.update(n)
        yield f"{value},{n}"


def count_in_python(lines: DataStream) -> DataStream:
    return lines.key_by(lambda line: line, Types.STRING()).process(Count(), Types.STRING())


def count_in_sql(environment: StreamExecutionEnvironment, lines: DataStream) -> DataStream:
    tables = StreamTableEnvironment.create(environment)
    tables.create_temporary_view("lines", tables.from_data_stream(lines).alias("line"))
    counts = tables.sql_query("SELECT line, COUNT(*) AS n FROM lines GROUP BY line")
    return tables.to_changelog_stream(counts)


def configuration(checkpoint: Path, parallelism: str, checkpoint_s: str) -> Configuration:
    settings = {
        "parallelism.default": parallelism,
        "python.client.executable": sys.executable,
        "python.executable": sys.executable,
        "python.execution-mode": "thread",  # in the JVM's process: the other mode asks the JVM for each key's state
        "restart-strategy.type": "none",
        "execution.checkpointing.interval": f"{float(checkpoint_s) * 1000:.0f} ms",
        "execution.checkpointing.dir": checkpoint.as_uri(),
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        # Many rows that come together are counted together.
        "table.exec.mini-batch.enabled": "true",
        "table.exec.mini-batch.allow-latency": "1 s",
        "table.exec.mini-batch.size": "50000",
    }
    complete = sorted(checkpoint.glob("*/chk-*/_metadata"), key=lambda file: file.stat().st_mtime)
    if complete:
        settings["execution.state-recovery.path"] = complete[-1].parent.as_uri()
    made = Configuration()
    for name, value in settings.items():
        made.set_string(name, value)
    return made


def main() -> None:
    kind, source, output, checkpoint, parallelism, checkpoint_s = sys.argv[1:]
    environment = StreamExecutionEnvironment.get_execution_environment(
        configuration(Path(checkpoint), parallelism, checkpoint_s)
    )
    files = FileSource.for_record_stream_format(StreamFormat.text_line_format(), source).build()
    lines = environment.from_source(files, WatermarkStrategy.no_watermarks(), "lines", Types.STRING())
    counts = count_in_sql(environment, lines) if kind == "sql" else count_in_python(lines)
    # A restored sink goes on in the folders (its buckets) that it had before, unless the name is new.
    parent, name = Path(output).parent, Path(output).name
    sink = FileSink.for_row_format(str(parent), Encoder.simple_string_encoder())
    sink.with_bucket_assigner(BucketAssigner.date_time_bucket_assigner(f"'{name}'"))
    sink.with_rolling_policy(RollingPolicy.on_checkpoint_rolling_policy())
    counts.sink_to(sink.build())
    environment.execute("count")


if __name__ == "__main__":
    main()
