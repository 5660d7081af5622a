"""One batch of one subtask of an operator without keys: rows in, calls of the processor, rows and state out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa

from statelog.errors import ErrorKind, ProcessorError
from statelog.state.operator import OutputCodec
from statelog.state.operator_processor import OperatorContext, OperatorProcessor
from statelog.state.operator_state import (
    BroadcastState,
    OperatorListState,
    OperatorStateBinding,
    OperatorStateMode,
    Phase,
    Stage,
    make_state,
)
from statelog.state.snapshot import Elements, Section, join_elements

__all__ = ["Operator", "OperatorInput", "OperatorSubtask"]

_CHUNK_ROWS: Final = 10_000
_S = TypeVar("_S", OperatorListState, BroadcastState)
_T = TypeVar("_T")


@dataclass(frozen=True)
class OperatorInput:
    """All input rows of a subtask in one batch.

    Parameters
    ----------
    rows : pyarrow.RecordBatch
        Rows in order of arrival; no columns if there are none.
    broadcast : pyarrow.RecordBatch or None
        Rows of the broadcast input, in the same order at every subtask; None if the operator has none.
    subtask : int
        The subtask that gets them.
    time_ms : int or None
        The batch time that they carry; None if there are none.
    """

    rows: pa.RecordBatch
    broadcast: pa.RecordBatch | None
    subtask: int
    time_ms: int | None

    @property
    def count(self) -> int:
        """Number of rows of both inputs."""
        return sum(rows.num_rows for rows in (self.rows, self.broadcast) if rows is not None)


@dataclass(frozen=True)
class Operator:
    """What an operator without keys is made of, on the side of the tasks.

    Parameters
    ----------
    uid : str
        The operator's name, for messages.
    processor : OperatorProcessor
        The user's processor.
    states : list of OperatorStateBinding
        The states that the processor declared.
    to_rows, to_broadcast_rows : callable
        Make the processor's row objects from columns.
    output : OutputCodec
        Makes columns from the processor's output rows.
    """

    uid: str
    processor: OperatorProcessor
    states: list[OperatorStateBinding]
    to_rows: Callable[[pa.RecordBatch], list[Any]]
    to_broadcast_rows: Callable[[pa.RecordBatch], list[Any]]
    output: OutputCodec


class _Handle:
    """What a processor's ``init`` gets on a task: the states that were declared on the driver."""

    def __init__(
        self, operator: Operator, states: dict[str, OperatorListState | BroadcastState], context: OperatorContext
    ) -> None:
        self.context = context
        self._uid = operator.uid
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
                f"init() asks for {mode.removeprefix('operator-')} state '{name}' on a task, but did not declare it so"
                " when the query was built.",
                kind=ErrorKind.STATE_USAGE,
                hint="init() must declare the same states every time.",
            )
        return state


class OperatorSubtask:
    """Runs a processor over one batch of one subtask.

    The order of calls is :meth:`process` once, consumed to its end; then :meth:`sections` gives the state after the
    batch.

    Parameters
    ----------
    operator : Operator
        The operator.
    stored : mapping of str to sequence of Elements
        The state before the batch, by name; also states that the processor does not declare any more.
    context : OperatorContext
        Where and when.
    """

    def __init__(self, operator: Operator, stored: Mapping[str, Sequence[Elements]], context: OperatorContext) -> None:
        self._operator = operator
        self._stored = stored
        self._context = context
        self._phase = Phase()
        self._states = {
            binding.descriptor.name: make_state(binding, stored.get(binding.descriptor.name, ()), self._phase)
            for binding in operator.states
        }

    def process(self, read: OperatorInput) -> Iterator[pa.RecordBatch]:
        """Call the processor with the batch's rows.

        Yields
        ------
        pyarrow.RecordBatch
            Output rows, some at a time.

        Raises
        ------
        ProcessorError
            If the processor raises, or gives values or rows that do not fit their schemas.
        """
        operator, processor, context = self._operator, self._operator.processor, self._context
        self._call(Stage.INIT, processor.init, _Handle(operator, self._states, context))
        if read.broadcast is not None:
            rows = iter(operator.to_broadcast_rows(read.broadcast))
            self._call(Stage.PROCESS_BROADCAST, processor.processBroadcast, rows, context)
        output = self._call(Stage.PROCESS, lambda: iter(processor.process(self._rows(read.rows), context)))
        while rows_out := self._call(Stage.PROCESS, lambda: list(itertools.islice(output, _CHUNK_ROWS))):
            yield self._call(Stage.PROCESS, operator.output.encode, rows_out, lambda _: "process()")
        self._call(Stage.CLOSE, processor.close)

    def _rows(self, rows: pa.RecordBatch) -> Iterator[Any]:
        for start in range(0, rows.num_rows, _CHUNK_ROWS):
            yield from self._operator.to_rows(rows.slice(start, _CHUNK_ROWS))

    @property
    def is_changed(self) -> bool:
        """Whether a state was written."""
        return any(state.is_changed for state in self._states.values())

    def sections(self) -> list[Section]:
        """The state after the batch, in order of the states' names.

        Raises
        ------
        ProcessorError
            If a number is too large for its field.
        """
        sections = [self._call(Stage.PROCESS, state.section) for state in self._states.values()]
        sections += [
            join_elements(parts[0].section.state, parts)
            for name, parts in self._stored.items()
            if name not in self._states and parts
        ]
        return sorted(sections, key=lambda section: section.state.name)

    def _call(self, stage: Stage, method: Callable[..., _T], *arguments: Any) -> _T:
        self._phase.stage = stage
        try:
            return method(*arguments)
        except Exception as error:
            where = f"operator '{self._operator.uid}': {stage}() failed at subtask {self._context.subtaskIndex}"
            if isinstance(error, ProcessorError):
                raise ProcessorError(f"{where}: {error.message}", kind=error.kind, hint=error.hint) from error
            raise ProcessorError(
                f"{where}: {type(error).__name__}: {error}.",
                hint="The traceback above shows the line of the processor. Nothing of this batch was kept;"
                " start the query again when the code is mended.",
            ) from error
