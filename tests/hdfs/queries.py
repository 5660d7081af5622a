"""A job whose checkpointLocation is in HDFS."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pyspark.sql import DataFrame, SparkSession

from statelog.storage import open_store
from tests.spark.support import ORDERS, Job


@dataclass(frozen=True)
class HdfsJob(Job):
    """A job with input and output in directories of this host."""

    folder: str = ""
    """The location above that of Spark's checkpoint."""
    spelled: str = ""
    """The checkpointLocation as the query gets it, if otherwise."""

    @property
    def checkpoint_location(self) -> str:
        return self.spelled or f"{self.folder}/checkpoint"

    def ends(self) -> dict[int, int]:
        store = open_store(f"{self.folder}/checkpoint")
        names = [info.name for info in store.list("offsets/") if info.name.removeprefix("offsets/").isdecimal()]
        return {int(name[8:]): json.loads(store.read(name).splitlines()[2])["logOffset"] + 1 for name in names}

    def read(self, session: SparkSession, schema: str = ORDERS) -> DataFrame:
        return session.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(f"file:{self.input}")

    def elsewhere(self, name: str) -> Self:
        job = super().elsewhere(name)
        assert isinstance(job, type(self))
        return replace(job, folder=f"{self.folder}/{name}")

    @classmethod
    def at(cls, root: Path, folder: str, spelled: str = "") -> Self:
        """A job without a location of its own for the state."""
        return cls(root, folder=folder, spelled=spelled)
