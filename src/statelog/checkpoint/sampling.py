"""Stores the sample of an attempt's input rows."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from statelog.checkpoint.attempt import Attempt
from statelog.checkpoint.protocol import Begun
from statelog.checkpoint.sample import Sample, SampledOperator, SampleHeader, encode_sample, sample_name
from statelog.errors import StatelogError
from statelog.log_fields import get_logger
from statelog.operators.keyed.operator import KeyedRows
from statelog.runs.byte_slices import size_of, to_batches

_log = get_logger(__name__)


def store_sample(
    attempt: Attempt, begun: Begun, operator: SampledOperator, read: KeyedRows, initial: KeyedRows | None
) -> None:
    """Store the rows that an attempt has read, if there are any; a failure is a warning.

    In batch 0 of an operator with an initial state, an empty sample tells that the subtask had no rows of it.
    """
    options, task = attempt.options, attempt.task
    parts = [_batches(read)] if initial is None else [_batches(read), _batches(initial)]
    if not any(parts) and not (task.batch == 0 and operator.initial_columns):
        return
    size_bytes = sum(map(size_of, parts))
    is_left_out = size_bytes > options.sample_max_bytes
    if is_left_out and (task.run_id, task.uid) not in attempt.memory.left_out:
        attempt.memory.left_out.add((task.run_id, task.uid))
        _log.warning(
            "%s: its input rows take %d bytes, and those of a batch with more than Options(sample_max_bytes=%d) are"
            " left out of its sample",
            task.name,
            size_bytes,
            options.sample_max_bytes,
        )
    header = SampleHeader(task.batch, operator, initial is not None, size_bytes if is_left_out else 0)
    try:
        rows, *more = [_as_table(part, is_left_out=is_left_out) for part in parts]
        data = encode_sample(Sample(header, rows, more[0] if more else None), options.codec)
        attempt.open_store(begun.store).put(sample_name(begun.sample_folder, task.batch, task.attempt), data)
    except (StatelogError, pa.ArrowException) as error:
        _log.warning("%s: the sample of its input rows could not be stored: %s", task.name, error)


def _batches(read: KeyedRows) -> list[pa.RecordBatch]:
    """The rows in batches; none without rows, which have no columns either."""
    return to_batches(read.rows) if len(read.hashes) else []


def _as_table(part: Sequence[pa.RecordBatch], *, is_left_out: bool) -> pa.Table:
    schema = part[0].schema if part else pa.schema([])
    return pa.Table.from_batches([] if is_left_out else part, schema)
