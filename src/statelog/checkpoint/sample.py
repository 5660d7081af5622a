"""A sample: the input rows of one attempt of a subtask in one batch, stored so that the batch can be replayed.

No checkpoint consists of samples, and nothing but a replay reads them. Their layout is specified in ``docs/format.md``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa

from statelog.errors import ConfigurationError, CorruptionError, ErrorKind
from statelog.log.entry import Checkpoint
from statelog.log.open import SAMPLES_FOLDER
from statelog.operators.event_time import EventTime
from statelog.runs import digests

_METADATA: Final = b"statelog.sample"
_VERSION: Final = 1
_CHECKSUM_BYTES: Final = 16


class Frames(msgspec.Struct, frozen=True):
    """The limits of the frames that a processor gets."""

    max_rows: int
    max_bytes: int
    keeps_integers: bool


class SampledOperator(msgspec.Struct, frozen=True):
    """The parts of a keyed operator, beside its processor, that calls of the processor depend on."""

    columns: list[str]
    """The input columns."""
    key_columns: list[int]
    """Positions of the grouping columns."""
    output: str
    """The output type, as Spark's JSON has it."""
    session_zone: str
    time_mode: str
    frames: Frames | None = None
    """None if the processor takes rows or columns."""
    event_time: EventTime | None = None
    """Of the input rows."""
    output_event_time: EventTime | None = None
    initial_columns: list[str] = []
    """Columns of the initial state; empty if there is none."""
    initial_key_columns: list[int] = []


class SampleHeader(msgspec.Struct, frozen=True):
    """The description of a sample."""

    batch: int
    operator: SampledOperator
    has_initial: bool
    """Whether rows of an initial state follow the input rows."""
    left_out_bytes: int
    """The size of the rows if they are too many for a sample, and therefore left out; otherwise 0."""
    version: int = _VERSION


@dataclass(frozen=True)
class Sample:
    """A sample in memory."""

    header: SampleHeader
    rows: pa.Table
    """In order of arrival, with the operator's columns."""
    initial: pa.Table | None
    """Rows of the initial state."""


def sample_name(folder: str, batch: int, attempt: int) -> str:
    """The object of a sample in the folder of its start and subtask; Spark uses an attempt's id once."""
    return f"{folder}/{batch}-{attempt}.arrow"


def sample_folder(root: str, epoch: int, subtask: int) -> str:
    """The folder of the samples that a subtask writes in a start; `root` is the operator's folder."""
    return f"{root}/{SAMPLES_FOLDER}/{epoch}/{subtask}"


def sample_names(root: str, checkpoints: Iterable[Checkpoint]) -> set[str]:
    """The samples of the attempts that checkpoints name, whether they exist or not."""
    return {
        sample_name(sample_folder(root, checkpoint.epoch, segment.subtask), checkpoint.batch, segment.attempt)
        for checkpoint in checkpoints
        for segment in checkpoint.segments
    }


def encode_sample(sample: Sample, codec: str | None) -> bytes:
    """The stored form of a sample; `codec` is Arrow's name of the compression."""
    header = sample.header
    sink = pa.BufferOutputStream()
    rows = sample.rows.rename_columns(header.operator.columns) if sample.rows.num_columns else sample.rows
    _write(rows.replace_schema_metadata({_METADATA: msgspec.json.encode(header)}), sink, codec)
    if sample.initial is not None:
        _write(sample.initial.rename_columns(header.operator.initial_columns), sink, codec)
    data: bytes = sink.getvalue().to_pybytes()
    return data + digests.checksum(data)


def decode_sample(data: bytes, name: str) -> Sample:
    """Read a sample; CorruptionError if it is not as written, ConfigurationError if it is of a later version."""
    body = memoryview(data)[:-_CHECKSUM_BYTES]
    if digests.checksum(body) != data[-_CHECKSUM_BYTES:]:
        raise CorruptionError(
            f"{name}: the {len(data)} bytes of the sample are not those that were written.",
            hint="Pass the batch's rows to replay as rows=.",
        )
    source = pa.BufferReader(body)
    rows = _read(source)
    metadata = rows.schema.metadata[_METADATA]
    version = msgspec.json.decode(metadata)["version"]
    if version > _VERSION:
        raise ConfigurationError(
            f"{name}: the sample is of version {version}, and this statelog reads up to {_VERSION}.",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            hint="Use the version of statelog that wrote it, or a later one.",
        )
    header = msgspec.json.decode(metadata, type=SampleHeader)
    return Sample(header, rows.replace_schema_metadata(None), _read(source) if header.has_initial else None)


def _write(rows: pa.Table, sink: pa.NativeFile, codec: str | None) -> None:
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(rows)


def _read(source: pa.NativeFile) -> pa.Table:
    with pa.ipc.open_stream(source) as reader:
        return reader.read_all()
