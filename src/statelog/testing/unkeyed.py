"""An unkeyed operator without Spark: the test's description of it, and the operator that Spark's workers would run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from statelog.convert.ddl import parse_ddl
from statelog.convert.types import parse_output
from statelog.coordinator.admission import OperatorConfig
from statelog.errors import ConfigurationError, ErrorKind
from statelog.history.operator_history import History
from statelog.local.restore import read_segment
from statelog.operators.unkeyed.processor import OperatorProcessor
from statelog.operators.unkeyed.snapshot import Elements, Snapshot
from statelog.operators.unkeyed.states import BroadcastState, Phase, Stage, make_state
from statelog.operators.unkeyed.subtask import UnkeyedInput
from statelog.options import Options
from statelog.runs.key_groups import row_hashes, subtasks_of
from statelog.spark.plan.checks import checked_uid
from statelog.spark.plan.declare import declare_unkeyed
from statelog.spark.plan.unkeyed_plan import require_broadcast_method
from statelog.spark.worker.specs import BROADCAST_COLUMN, UnkeyedSpec
from statelog.spark.worker.worker import HASH_COLUMN, SUBTASK_COLUMN, TIME_COLUMN, pickled_processor
from statelog.storage import LocalStore
from statelog.tasks.attempt import Attempt
from statelog.tasks.unkeyed_task import UnkeyedTask
from statelog.testing.rows import ColumnReader, ColumnWriter, OperatorArguments, read_schema

_ANY_PARALLELISM: Final = 1


@dataclass(frozen=True)
class UnkeyedData:
    """The rows of a batch; `broadcast` is None if the operator has no broadcast input."""

    rows: pa.RecordBatch
    broadcast: pa.RecordBatch | None


@dataclass(frozen=True)
class LocalUnkeyedOperator:
    """Implements :class:`statelog.testing.query.LocalOperator` for an unkeyed operator."""

    spec: UnkeyedSpec

    @property
    def uid(self) -> str:
        return self.spec.uid

    def config_of(self, query_id: str, run_id: str, parallelism: int) -> OperatorConfig:
        states = [state.bind().descriptor.to_stored() for state in self.spec.states]
        return OperatorConfig(query_id, run_id, self.uid, parallelism, b"", states)

    def split(self, data: UnkeyedData, parallelism: int, time_ms: int) -> list[UnkeyedInput]:
        subtasks = subtasks_of(row_hashes(data.rows.columns), parallelism)
        spec = replace(self.spec, parallelism=parallelism)
        parts: list[UnkeyedInput] = []
        for subtask in range(parallelism):
            own = data.rows.take(pa.array(np.flatnonzero(subtasks == subtask)))
            pieces = [_marked(own, "c", subtask, time_ms, is_copy=False)]
            if data.broadcast is not None:
                pieces.append(_marked(data.broadcast, "b", subtask, time_ms, is_copy=True))
            rows = pa.concat_tables([pa.table(piece) for piece in pieces], promote_options="default")
            parts.append(spec.read(rows.combine_chunks().to_batches(), subtask))
        return parts

    def task(self, attempt: Attempt) -> UnkeyedTask:
        return self.spec.task(attempt)

    def initial_objects(self, parallelism: int) -> list[bytes]:
        return []


class UnkeyedQuery:
    """An unkeyed operator as the test describes it; raises the same errors as ``statelog.process``."""

    def __init__(self, processor: OperatorProcessor, arguments: OperatorArguments, options: Options) -> None:
        name, zone = checked_uid(arguments.uid), arguments.sessionTimeZone
        columns = read_schema(arguments.input, "input")
        copies = None if arguments.broadcast is None else read_schema(arguments.broadcast, "broadcast")
        if copies is not None:
            require_broadcast_method(processor)
        output_type = parse_output(arguments.output, parse_ddl)
        pickled = pickled_processor(processor, name)
        self._writer = ColumnWriter(columns, "push()", zone)
        self._copies = None if copies is None else ColumnWriter(copies, "push(broadcast=)", zone)
        self.output = ColumnReader(output_type).rows
        spec = UnkeyedSpec(
            uid=name,
            instance="",
            parallelism=_ANY_PARALLELISM,
            columns=columns.names,
            output_schema=output_type,
            processor=pickled,
            options=options,
            broadcast_columns=None if copies is None else copies.names,
            states=declare_unkeyed(pickled, name, _ANY_PARALLELISM, parse_ddl),
        )
        self._bindings = {state.name: state.bind() for state in spec.states}
        self.operator = LocalUnkeyedOperator(spec)

    def data(self, rows: Sequence[Any], broadcast: Sequence[Any]) -> UnkeyedData:
        """Convert a batch's rows to columns."""
        if self._copies is None and broadcast:
            raise ConfigurationError(
                "push: the operator has no broadcast input.", hint="Pass broadcast= with its columns to Harness."
            )
        return UnkeyedData(self._writer.batch(rows), None if self._copies is None else self._copies.batch(broadcast))

    def state(self, name: str, history: History, location: str) -> Any:
        """A state at the newest checkpoint: a list per subtask, or the map of a broadcast state."""
        binding = self._bindings.get(name)
        if binding is None:
            raise ConfigurationError(
                f"There is no state '{name}'.",
                kind=ErrorKind.STATE_USAGE,
                hint=f"The processor declares: {', '.join(self._bindings) or 'nothing'}.",
            )
        phase = Phase()
        phase.stage = Stage.PROCESS
        held: list[Any] = []
        for segment in [] if history.latest is None else history.latest.segments:
            section = Snapshot(read_segment(LocalStore(location), segment), segment.name).sections.get(name)
            state = make_state(binding, [] if section is None else [Elements.all_of(section)], phase)
            held.append(dict(state.items()) if isinstance(state, BroadcastState) else list(state.get()))
        if binding.entry_codec is None:
            return held
        return held[0] if held else {}


def _marked(rows: pa.RecordBatch, prefix: str, subtask: int, time_ms: int, *, is_copy: bool) -> pa.RecordBatch:
    """Add the columns with which the query's plan hands rows to a subtask."""
    count = rows.num_rows
    columns = {f"{prefix}{index}": column for index, column in enumerate(rows.columns)}
    columns |= {
        SUBTASK_COLUMN: pa.array([subtask] * count, pa.int32()),
        BROADCAST_COLUMN: pa.array([is_copy] * count, pa.bool_()),
        HASH_COLUMN: pa.array(row_hashes(rows.columns).view(np.int64)),
        TIME_COLUMN: pa.array([time_ms] * count, pa.int64()),
    }
    return pa.RecordBatch.from_pydict(columns)
