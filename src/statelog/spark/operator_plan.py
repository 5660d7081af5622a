"""An operator as the plan of its query has it: all that the driver knows of it before the query starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession

from statelog.log.entry import Settings
from statelog.operators.watermark import WatermarkPolicy
from statelog.options import Options
from statelog.runs.schema import StateSchema
from statelog.spark.initial_tables import InitialTable
from statelog.spark.placement import Placement
from statelog.spark.ticks import NoDataRule


@dataclass(frozen=True)
class OperatorPlan:
    """An operator as its query's plan has it, known to the driver.

    Parameters
    ----------
    instance : str
        Unique per operator of the driver's program.
    session : SparkSession
        The session of the stream.
    uid : str or None
        The operator's name, if the user gave one.
    parallelism : int
        Number of subtasks.
    location : str or None
        Where the state is; None is a folder below the query's checkpointLocation.
    key_schema : bytes
        Arrow IPC schema message of the grouping columns.
    states : list of StateSchema
        The declared states.
    options : Options
        Options.
    watermark : WatermarkPolicy or None
        The operator's own watermark.
    deleted : tuple of str
        States that are to be removed if they exist.
    initial : DataFrame or None
        The rows of the initial state, each in the partition of its subtask.
    tables : list of InitialTable
        States that are loaded before the first batch.
    ticks : NoDataRule
        What the operator needs batches without data for.
    placement : Placement or None
        Where the subtasks run.
    settings : dict
        What the state of a keyed operator depends on.
    """

    instance: str
    session: SparkSession
    uid: str
    parallelism: int
    location: str | None
    key_schema: bytes
    states: list[StateSchema]
    options: Options
    watermark: WatermarkPolicy | None = None
    deleted: tuple[str, ...] = ()
    initial: DataFrame | None = None
    tables: list[InitialTable] = field(default_factory=list)
    ticks: NoDataRule = field(default_factory=NoDataRule)
    placement: Placement | None = None
    settings: Settings = field(default_factory=dict)

    @property
    def observation(self) -> str:
        """Name of the observation that marks the operator in a query's plan."""
        return f"statelog {self.uid} {self.instance}"

    @property
    def has_initial(self) -> bool:
        """Whether something is to be stored before the first batch."""
        return self.initial is not None or bool(self.tables)
