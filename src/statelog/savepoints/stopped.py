"""Chooses the batch and the operators to save from a stopped query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from statelog.checkpoint.admission import require_complete
from statelog.checkpoint.query_operators import BatchOperators, OperatorLog, QueryLogs
from statelog.errors import ConfigurationError, ErrorKind, StateMissingError
from statelog.log_fields import get_logger
from statelog.savepoints.spark_checkpoint import SparkCheckpoint

_log = get_logger(__name__)


@dataclass(frozen=True)
class StoppedQuery:
    """A query's checkpointLocation and the logs of its operators."""

    spark: SparkCheckpoint
    logs: QueryLogs

    def choose(self, batch: int | None) -> tuple[int, list[OperatorLog]]:
        """Choose the batch, by default the newest that Spark has committed, and find the query's operators as of it.

        Raises ConfigurationError if no state of the query or of one of its operators is found, StateMissingError if
        Spark or an operator lacks the batch, CorruptionError if a checkpoint that later ones build on is lost.
        """
        searched = self.logs.given or self.logs.home
        if not any(searched == log.location for log in self.logs.found):
            raise ConfigurationError(
                f"{searched} holds no state of query {self.logs.query_id}.",
                kind=ErrorKind.CHECKPOINT_MISSING,
                hint="Pass location= if the operators were given one.",
            )
        committed = self.spark.committed()
        if not committed or (batch is not None and batch not in committed):
            raise self._not_committed(batch, committed)
        chosen = committed[-1] if batch is None else batch
        found = self.logs.at(chosen, self.spark.time_ms(chosen))
        self._require_batch(chosen, found, committed)
        for former in found.former:
            _log.warning(
                "%s is left out: the query went on without it after batch %d",
                former.name,
                former.newest,
            )
        return chosen, found.operators

    def _require_batch(self, batch: int, found: BatchOperators, committed: Sequence[int]) -> None:
        for uid, location in found.missing.items():
            raise ConfigurationError(
                f"{self.spark.location}: the query has an operator '{uid}', and {location} holds no state of it.",
                kind=ErrorKind.CHECKPOINT_MISSING,
                hint="Was it moved? Pass its new place as location=.",
            )
        for log in found.operators:
            require_complete(log.history, log.name)
        for log in found.operators:
            if self._has_batch(log, batch):
                continue
            older = [one for one in committed if one < batch and self._is_complete(one)]
            raise StateMissingError(
                f"{self.spark.location}: Spark has committed batch {batch}, and {log.name} has no checkpoint of it: its"
                f" newest is {log.newest}.",
                hint="Run statelog.rewind(checkpointLocation) first"
                + (f", or choose batch {older[-1]}, the newest that all operators have." if older else "."),
            )
        if not found.operators:
            raise self._not_committed(batch, [one for one in committed if self._is_complete(one)])

    def _is_complete(self, batch: int) -> bool:
        operators = self.logs.at(batch, self.spark.time_ms(batch)).operators
        return bool(operators) and all(self._has_batch(log, batch) for log in operators)

    def _has_batch(self, log: OperatorLog, batch: int) -> bool:
        checkpoint, time_ms = log.history.at(batch), self.spark.time_ms(batch)
        is_sparks = checkpoint is not None and time_ms in (None, checkpoint.batch_time_ms)
        return is_sparks and log.history.has_batch(batch)

    def _not_committed(self, batch: int | None, kept: Sequence[int]) -> StateMissingError:
        asked = "There is no batch" if batch is None else f"Batch {batch} is none"
        ends = f" The first is {kept[0]}, the last {kept[-1]}." if kept else ""
        return StateMissingError(
            f"{self.spark.location}: {asked} that Spark has committed and all operators have a checkpoint of.{ends}",
            hint="Options(retained_checkpoints=...) keeps more of them."
            if kept
            else "Run the query until its first batch is over; if Spark and the state disagree, run"
            " statelog.rewind(checkpointLocation) first.",
        )
