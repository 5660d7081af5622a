"""The classes with which users write unkeyed operators: processor, handle and context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from statelog.operators.unkeyed.states import BroadcastState, OperatorListState


@dataclass(frozen=True)
class OperatorContext:
    """Where and when a processor runs.

    Parameters
    ----------
    subtaskIndex : int
        Number of the subtask, from 0.
    parallelism : int
        Number of subtasks.
    batchId : int
        Spark's batch id; 0 in a batch query.
    batchTimeMs : int
        Time of the batch, milliseconds since the Unix epoch; the same when the batch is repeated.
    isRestored : bool
        Whether this is the first batch of a start that continues with the state of an earlier start.
    isRedistributed : bool
        Whether that earlier start had a different parallelism, so that the state was redistributed.
    """

    subtaskIndex: int
    parallelism: int
    batchId: int
    batchTimeMs: int
    isRestored: bool = False
    isRedistributed: bool = False


class OperatorHandle(Protocol):
    """Declares states in :meth:`OperatorProcessor.init`; schemas are StructTypes or DDL texts."""

    @property
    def context(self) -> OperatorContext:
        """Where and when the processor runs; on the driver subtask, batch and time are -1."""

    def getListState(self, stateName: str, schema: Any) -> OperatorListState:
        """Declare a list state: its elements are distributed evenly when the parallelism changes."""

    def getUnionListState(self, stateName: str, schema: Any) -> OperatorListState:
        """Declare a union list state: after a restart, every subtask gets the elements of all subtasks."""

    def getBroadcastState(self, stateName: str, keySchema: Any, valueSchema: Any) -> BroadcastState:
        """Declare a broadcast state: a map that is the same at every subtask."""


class OperatorProcessor(ABC):
    """Base class for the processors of unkeyed operators.

    Every subtask gets a fresh copy of the processor for every batch. The order of calls is :meth:`init`,
    :meth:`processBroadcast` if the operator has a broadcast input, :meth:`process`, :meth:`close`, even if there
    are no rows. Only the states last from batch to batch. A batch may run several times, each time with a
    fresh copy and from the same states and rows; effects outside of the states may therefore happen more than once.
    """

    @abstractmethod
    def init(self, handle: OperatorHandle) -> None:
        """Declare the states; also called once on the driver, when the query is built.

        It must declare the same states every time, and cannot read or write them.
        """

    def processBroadcast(self, rows: Iterator[Any], context: OperatorContext) -> None:
        """Handle the broadcast input of a batch; the only place where broadcast states may be written.

        Parameters
        ----------
        rows : iterator of Row
            All rows of the broadcast DataFrame. Every subtask gets the same rows in the same order, which is not the
            order of arrival.
        context : OperatorContext
            Where and when the processor runs.
        """
        raise NotImplementedError

    @abstractmethod
    def process(self, rows: Iterator[Any], context: OperatorContext) -> Iterator[Any]:
        """Handle the subtask's rows of a batch; called once, even if there are none.

        Parameters
        ----------
        rows : iterator of Row
            The rows. Any subtask may get a row.
        context : OperatorContext
            Where and when the processor runs.

        Returns
        -------
        iterator of Row
            The output. States may be written until it is exhausted.
        """

    def close(self) -> None:  # noqa: B027 - most processors have nothing to do
        """Release the processor's resources; the states can no longer be used."""
