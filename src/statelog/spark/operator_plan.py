"""An operator's plan: everything that the driver knows of the operator before its query starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyspark.sql import DataFrame, SparkSession

from statelog.log.entry import Settings
from statelog.operators.watermark import WatermarkPolicy
from statelog.options import Options
from statelog.runs.schema import StateSchema
from statelog.spark.initial import InitialTable
from statelog.spark.no_data import NoDataRule
from statelog.spark.placement import Placement


@dataclass(frozen=True)
class OperatorPlan:
    """A planned operator, as the driver's endpoint knows it."""

    instance: str
    """Unique among the operators of the driver's program."""
    session: SparkSession
    uid: str
    parallelism: int
    location: str | None
    """None for a folder below the query's checkpointLocation."""
    options: Options
    key_schema: bytes = b""
    """Arrow IPC schema message of the grouping columns; empty for an unkeyed operator."""
    states: list[StateSchema] = field(default_factory=list)
    watermark: WatermarkPolicy | None = None
    """The operator's own watermark."""
    deleted: tuple[str, ...] = ()
    """States to delete if they exist."""
    initial: DataFrame | None = None
    """The rows of the initial state, each in the partition of its subtask."""
    tables: list[InitialTable] = field(default_factory=list)
    """States to load before the first batch."""
    no_data_rule: NoDataRule = field(default_factory=NoDataRule)
    placement: Placement | None = None
    stores_output: bool = False
    """Whether the operator stores the query's output, for a sink that gets the stored rows."""
    in_front: frozenset[str] = frozenset()
    """The observations in the plan of its input, which mark the operators from which its rows come."""
    settings: Settings = field(default_factory=dict)
    """Settings that the state of a keyed operator depends on, such as its time mode."""

    @property
    def observation(self) -> str:
        """Name of the observation that marks the operator in a query's plan."""
        return f"statelog {self.uid} {self.instance}"

    @property
    def has_initial(self) -> bool:
        """Whether state must be stored before the first batch."""
        return self.initial is not None or bool(self.tables)
