"""Runs one batch of one subtask of an unkeyed operator: rows in, calls of the processor, rows and state out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import pyarrow as pa

from statelog.errors import ErrorKind, ProcessorError
from statelog.operators.keyed.operator import OutputCodec
from statelog.operators.keyed.outputs import Outputs
from statelog.operators.unkeyed.processor import OperatorContext, OperatorProcessor
from statelog.operators.unkeyed.snapshot import Elements, StateElements, join_elements
from statelog.operators.unkeyed.states import (
    BroadcastState,
    OperatorListState,
    OperatorStateBinding,
    OperatorStateMode,
    Phase,
    Stage,
    make_state,
)
from statelog.runs.byte_slices import BUDGET, Budget, RowsTooLarge, cut_rows

_CHUNK_ROWS: Final = 10_000
_S = TypeVar("_S", OperatorListState, BroadcastState)
_T = TypeVar("_T")


@dataclass(frozen=True)
class UnkeyedInput:
    """All input rows of a subtask in one batch."""

    rows: Sequence[pa.RecordBatch]
    """In order of arrival. The batches stay apart: together they may be more than Arrow's offsets reach."""
    broadcast: Sequence[pa.RecordBatch] | None
    """Rows of the broadcast input, in the same order at every subtask; None if the operator has none."""
    subtask: int
    time_ms: int | None
    """The batch time that the rows carry; None without rows."""

    @property
    def count(self) -> int:
        """Number of rows of both inputs."""
        return sum(batch.num_rows for batch in (*self.rows, *(self.broadcast or ())))


@dataclass(frozen=True)
class UnkeyedOperator:
    """An unkeyed operator as its tasks see it."""

    uid: str
    processor: OperatorProcessor
    states: list[OperatorStateBinding]
    to_rows: Callable[[pa.RecordBatch], list[Any]]
    """Makes the processor's row objects from columns."""
    to_broadcast_rows: Callable[[pa.RecordBatch], list[Any]]
    output: OutputCodec
    budget: Budget = BUDGET


class _Handle:
    """The handle that a processor's ``init`` gets on a task: the states declared on the driver."""

    def __init__(
        self, operator: UnkeyedOperator, states: dict[str, OperatorListState | BroadcastState], context: OperatorContext
    ) -> None:
        self.context = context
        self._modes = {binding.descriptor.name: binding.descriptor.mode for binding in operator.states}
        self._states = states

    def getListState(self, stateName: str, schema: Any) -> OperatorListState:
        return self._declared(stateName, OperatorStateMode.LIST, OperatorListState)

    def getUnionListState(self, stateName: str, schema: Any) -> OperatorListState:
        return self._declared(stateName, OperatorStateMode.UNION, OperatorListState)

    def getBroadcastState(self, stateName: str, keySchema: Any, valueSchema: Any) -> BroadcastState:
        return self._declared(stateName, OperatorStateMode.BROADCAST, BroadcastState)

    def _declared(self, name: str, mode: OperatorStateMode, kind: type[_S]) -> _S:
        state = self._states.get(name)
        if self._modes.get(name) is not mode or not isinstance(state, kind):
            raise ProcessorError(
                f"init() asks for {mode.removeprefix('operator-')} state '{name}' on a task, but did not declare it"
                " as such when the query was built.",
                kind=ErrorKind.STATE_USAGE,
                hint="Declare the same states in every call of init().",
            )
        return state


class UnkeyedSubtask:
    """Runs a processor over one batch of one subtask.

    The order of calls is :meth:`process` once, consumed to its end; then :meth:`sections` gives the state after the
    batch. `stored` is the state before it by name, with the states that the processor no longer declares.
    """

    def __init__(
        self, operator: UnkeyedOperator, stored: Mapping[str, Sequence[Elements]], context: OperatorContext
    ) -> None:
        self._operator = operator
        self._stored = stored
        self._context = context
        self._phase = Phase()
        self._states = {
            binding.descriptor.name: make_state(binding, stored.get(binding.descriptor.name, ()), self._phase)
            for binding in operator.states
        }

    def process(self, read: UnkeyedInput) -> Iterator[pa.RecordBatch]:
        """Call the processor with the batch's rows, and yield output rows as soon as they make a chunk.

        Raises ProcessorError if the processor raises, or returns values or rows that do not fit their schemas.
        """
        operator, processor, context = self._operator, self._operator.processor, self._context
        self._call(Stage.INIT, processor.init, _Handle(operator, self._states, context))
        if read.broadcast is not None:
            copies = self._rows(read.broadcast, operator.to_broadcast_rows)
            self._call(Stage.PROCESS_BROADCAST, processor.processBroadcast, copies, context)
        rows = self._rows(read.rows, operator.to_rows)

        def calls() -> Iterator[Iterable[Any]]:
            yield processor.process(rows, context)

        outputs = Outputs(operator.output, operator.budget)
        outputs.begin(calls(), lambda _: "process()", processor.process)
        has_more = True
        try:
            while has_more:
                has_more = self._call(Stage.PROCESS, outputs.take)
                yield from self._call(Stage.PROCESS, partial(outputs.encoded, is_last=not has_more))
        finally:
            self._phase.stage = Stage.CLOSE  # before generators are closed: they may not use the states any more
            outputs.end()
        self._call(Stage.CLOSE, processor.close)

    def _rows(self, batches: Sequence[pa.RecordBatch], to_rows: Callable[[pa.RecordBatch], list[Any]]) -> Iterator[Any]:
        for batch in batches:
            for part in cut_rows(batch, self._operator.budget.slice_bytes, _CHUNK_ROWS):
                yield from to_rows(part)

    @property
    def is_changed(self) -> bool:
        """Whether a state was written."""
        return any(state.is_changed for state in self._states.values())

    def sections(self) -> list[StateElements]:
        """The state after the batch, in the order of the states' names.

        Raises ProcessorError if a number is too large for its field, or a state is too large for one subtask.
        """
        most_bytes = self._operator.budget.elements_bytes
        sections = [self._section(name, partial(state.section, most_bytes)) for name, state in self._states.items()]
        sections += [
            self._section(name, partial(join_elements, parts[0].section.state, parts, most_bytes))
            for name, parts in self._stored.items()
            if name not in self._states and parts
        ]
        return sorted(sections, key=lambda section: section.state.name)

    def _section(self, name: str, make: Callable[[], StateElements]) -> StateElements:
        try:
            return self._call(Stage.PROCESS, make)
        except RowsTooLarge as error:
            raise ProcessorError(
                f"operator '{self._operator.uid}': state '{name}' is limited to"
                f" {self._operator.budget.elements_bytes:,} bytes per subtask, but is larger in subtask"
                f" {self._context.subtaskIndex}: {error}.",
                kind=ErrorKind.TOO_LARGE,
                hint="An unkeyed state is written as a whole. Keep large data in keyed state, or start with more"
                " subtasks, which share a list.",
            ) from error

    def _call(self, stage: Stage, method: Callable[..., _T], *arguments: Any) -> _T:
        self._phase.stage = stage
        try:
            return method(*arguments)
        except RowsTooLarge:
            raise
        except Exception as error:
            where = f"operator '{self._operator.uid}': {stage}() failed at subtask {self._context.subtaskIndex}"
            if isinstance(error, ProcessorError):
                raise ProcessorError(f"{where}: {error.message}", kind=error.kind, hint=error.hint) from error
            raise ProcessorError(
                f"{where}: {type(error).__name__}: {error}.",
                hint="The traceback of the cause shows the line of the processor. Nothing from this batch was kept;"
                " start the query again when the code is fixed.",
            ) from error
