"""A point: an operator's state at a moment, and how to name the moment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeAlias

import pyarrow as pa

from statelog.convert.state_tables import ElementColumns, StateColumns
from statelog.errors import ConfigurationError, ErrorKind
from statelog.log.entry import Settings
from statelog.log.open import PINS_FOLDER
from statelog.numbers import is_whole
from statelog.reading.keys import Keys
from statelog.runs.schema import StateSchema
from statelog.shown import utc_time
from statelog.storage import Store

At: TypeAlias = int | datetime | str
"""A checkpoint: its batch; a time, which means the newest one whose batch is not later; or the name of a pin.

Users may pass a text for each, see :func:`parse_at`."""


@dataclass(frozen=True)
class Point(ABC):
    """The state of an operator in a checkpoint, whatever keeps it, or in a savepoint."""

    store: Store
    location: str
    name: str
    """The operator in messages."""
    uid: str
    """The operator's name."""
    query_id: str
    parallelism: int
    """Number of subtasks; in a savepoint, the number of ranges of the keys."""
    batch: int
    batch_time_ms: int
    """Spark's time of the batch, milliseconds since the Unix epoch."""
    watermark_ms: int
    """The watermark in the batch, milliseconds since the Unix epoch."""
    key_schema: bytes
    """The key's fields, encoded; empty for an operator without keys."""
    states: Sequence[StateSchema]
    settings: Settings
    """The settings that the state depends on."""

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Stored bytes of the whole state."""

    @abstractmethod
    def held(self, since: int | None = None) -> AbstractContextManager[Callable[[], None]]:
        """Keep the point readable during a block; yields a function to call between two reads.

        With `since`, the changes of each batch from that one on are kept too.
        """

    @abstractmethod
    def changes(self, stored: StateSchema, keys: Keys | None = None) -> Iterator[pa.RecordBatch]:
        """The entries of a keyed state, or of some keys, as puts in run order.

        ConfigurationError if the keys do not fit; CorruptionError or StorageError, as rows are read, if a file is
        damaged or cannot be read.
        """

    @abstractmethod
    def rows(
        self,
        stored: StateSchema,
        columns: StateColumns | ElementColumns,
        chosen: Sequence[str],
        keys: Keys | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a state, or of some keys, with the `chosen` columns among theirs; raises as :meth:`changes`."""

    def require_keys(self) -> None:
        """Refuse keys for an operator that has none."""
        if not self.key_schema:
            raise ConfigurationError(f"{self.name} has no keys: its state is kept by subtask.", hint="Omit keys=.")


def parse_at(text: str) -> At:
    """A checkpoint from text: a batch, a pin, or a time in ISO 8601, in UTC without a zone; else ConfigurationError."""
    if text.startswith(f"{PINS_FOLDER}/"):
        return text
    try:
        return int(text)
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(
            f"'{text}' is neither a batch nor a time nor the name of a pin.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Pass a batch number, a time such as 2026-05-01T12:00:00, or the name of a pin.",
        ) from error
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def checked_at(at: object) -> At | None:
    """A checkpoint as a user names it; a text is read by :func:`parse_at`. ConfigurationError for anything else."""
    if at is None or isinstance(at, datetime):
        return at
    if isinstance(at, str):
        return parse_at(at)
    if is_whole(at):
        return int(at)
    raise ConfigurationError(
        f"at is {at!r:.80}.",
        kind=ErrorKind.VALUE_MISMATCH,
        hint="Pass a batch, a datetime with its zone, a text such as '2026-05-01T12:00:00+02:00', or a pin's name.",
    )


def is_settled(*at: At | None) -> bool:
    """Whether these always select the same checkpoints; a time or the newest one may select others later."""
    return all(isinstance(checked_at(one), int | str) for one in at)


def time_limit_ms(time: datetime) -> float:
    """A time in milliseconds since the Unix epoch; ConfigurationError if it has no zone."""
    if time.tzinfo is None:
        raise ConfigurationError(
            f"at is {time!r}, which has no time zone.",
            kind=ErrorKind.VALUE_MISMATCH,
            hint="Pass a datetime with tzinfo, such as datetime.now(timezone.utc), or a batch.",
        )
    return time.timestamp() * 1000


def utc_text(time_ms: int) -> str:
    """A time in UTC, in ISO 8601, to the millisecond."""
    time = utc_time(time_ms)
    return f"{time_ms} ms" if time is None else time.isoformat(timespec="milliseconds")


def listed(names: Sequence[str]) -> str:
    """Names in quotation marks, for messages."""
    return ", ".join(f"'{name}'" for name in names) or "none"
