"""The description of an operator that a test passes to the harness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.types import StructType

from statelog.convert.ddl import parse_ddl
from statelog.convert.types import parse_schema
from statelog.errors import ConfigurationError
from statelog.runs.times import Watermark


@dataclass(frozen=True)
class OperatorArguments:
    """The arguments of :class:`statelog.testing.Harness` that describe the operator."""

    input: StructType | str
    output: StructType | str
    keys: Sequence[str] = ()
    timeMode: str = "None"
    pandas: bool = False
    initialState: tuple[StructType | str, Sequence[Any]] | None = None
    eventTime: str | None = None
    eventTimeColumnName: str = ""
    watermark: Watermark | None = None
    keyHash: Callable[[tuple[Any, ...]], int] | None = None
    broadcast: StructType | str | None = None
    sessionTimeZone: str = "UTC"
    uid: str | None = None


def read_schema(schema: StructType | str, subject: str) -> StructType:
    """Parse the columns that a test names; `subject` is their argument, for messages."""
    parsed = parse_schema(schema, f"Harness: {subject}", parse_ddl)
    if len(set(parsed.names)) < len(parsed):
        raise ConfigurationError(f"Harness: two columns of {subject} have one name.", hint="Rename one of them.")
    return parsed
