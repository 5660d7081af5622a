"""Messages between tasks and the coordinator; encoded as MessagePack, never unpickled."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from statelog.checkpoint.redistribution import SnapshotView
from statelog.local.materializer import MaintenanceRequest
from statelog.local.restore_plan import RestorePlan
from statelog.log.references import Level
from statelog.metrics import Recorded
from statelog.runs.times import NO_TIME_MS


class TaskId(msgspec.Struct, frozen=True):
    """Which task calls.

    Parameters
    ----------
    query_id, run_id : str
        Spark's ids of the query and of its run.
    uid : str
        The operator.
    instance : str
        The operator's place in the driver's program, to tell two operators of one uid apart.
    batch : int
        Spark's batch id.
    subtask : int
        Number of the subtask.
    attempt : int
        Spark's task attempt id.
    """

    query_id: str
    run_id: str
    uid: str
    instance: str
    batch: int
    subtask: int
    attempt: int


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A subtask begins a batch.

    Parameters
    ----------
    task : TaskId
        The caller.
    partition : int
        Spark's partition id of the task.
    input_rows : int
        Rows that the subtask has read.
    batch_time_ms : int or None
        The batch time in the rows, milliseconds since the Unix epoch; None if there are none.
    """

    task: TaskId
    partition: int
    input_rows: int
    batch_time_ms: int | None


class Witness(msgspec.Struct, frozen=True, array_like=True):
    """An object of the location that the driver has written: whoever does not see it has another place before it.

    Parameters
    ----------
    name : str
        The object.
    head : bytes
        How it begins.
    """

    name: str
    head: bytes


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """What the subtask starts from.

    Parameters
    ----------
    epoch : int
        The run's epoch.
    genesis, head : bytes
        Chain digests of the subtask's empty state and of its state before the batch.
    inline_bytes : int
        Changesets up to this size are sent with the ack.
    upload_prefix : str
        Larger ones are written under this prefix.
    store : str
        Location of the store.
    batch_time_ms, watermark_ms, late_watermark_ms : int
        The batch's time, the watermark up to which timers fire in it, and the one up to which its rows are late.
    timers_after_ms : int
        No timer up to this time is left to fire.
    generations, certain_generations : dict
        How often each state that was ever deleted has been, with this run and as of the checkpoint before: only what
        that says is gone for good.
    initial : str
        The object with the subtask's rows of the initial state, as an Arrow IPC stream; empty if there are none.
    snapshot_view : SnapshotView or None
        The state before the batch of an operator without keys; its chain digests are empty.
    closed_ms : int
        Windows that end up to then were closed by runs with other settings.
    expires_by : dict of str to str
        For each state that has no TTL any more the time that what is there expires by.
    maintenance : MaintenanceRequest or None
        What to do after the batch for the upkeep of keyed state, or before its end if the changelog is off.
    witness : Witness or None
        What a process of another host looks for, once in a run, before it works on the location.
    """

    epoch: int
    genesis: bytes
    head: bytes
    inline_bytes: int
    upload_prefix: str
    store: str
    batch_time_ms: int
    watermark_ms: int
    late_watermark_ms: int = 0
    timers_after_ms: int = NO_TIME_MS
    generations: dict[str, int] = {}
    certain_generations: dict[str, int] = {}
    initial: str = ""
    closed_ms: int = NO_TIME_MS
    expires_by: dict[str, str] = {}
    snapshot_view: SnapshotView | None = None
    maintenance: MaintenanceRequest | None = None
    witness: Witness | None = None


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """A subtask asks what it lacks; `known` are the digests of the states that it has."""

    task: TaskId
    known: list[bytes]


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """What leads from a state that the subtask has to the state before the batch."""

    missing: RestorePlan


class ReadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A subtask has read some of what it lacks.

    Parameters
    ----------
    task : TaskId
        Who calls.
    read_bytes, known_bytes : int
        How much, and of how much.
    """

    task: TaskId
    read_bytes: int
    known_bytes: int


class UploadedPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a changeset that was written while the batch ran.

    Parameters
    ----------
    name : str
        The object.
    checksum : bytes
        Its checksum.
    length : int
        Its size in bytes.
    rows : int
        Changes in it.
    """

    name: str
    checksum: bytes
    length: int
    rows: int


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """A subtask has processed all its rows; the changeset follows as bytes unless it has a name.

    Parameters
    ----------
    task : TaskId
        The caller.
    checksum : bytes
        Checksum of the changeset, or of its last part.
    length : int
        Its size in bytes.
    rows, input_rows : int
        Changes in it, and rows that the subtask read.
    name : str
        The object that holds it; empty if its bytes follow.
    subtask_s : float
        Time spent on the checkpoint since the processor returned, and on encoding before.
    late_rows : int
        How many of the rows were late, left out or returned.
    max_event_ms : list of (int or None)
        The largest event time of each input, late rows included; None for an input without rows. Empty if the
        operator has no watermark of its own.
    timers_to_ms : int
        No timer up to this time is left to fire after the batch.
    is_unchanged : bool
        Whether the subtask's snapshot is still the one that it started from, and nothing follows.
    element_counts : dict of int
        Number of elements in the snapshot, by state.
    copies : dict of bytes
        Checksum of each broadcast state, which all subtasks must agree on.
    parts : list of UploadedPart
        The parts of the changeset before the last one, in order: what a later part says of an entry counts.
    measured : Recorded
        What was measured of the subtask's requests to the store.
    levels : list of Level
        The subtask's state as of an earlier batch, or of this one, that is materialized now; empty if none is. Runs
        without a name follow the changeset as bytes, in order.
    has_changeset : bool
        Whether the changes are in a changeset; otherwise they are in the levels, or there are none.
    job : str
        The grant of the job that the levels or the failure come from; empty without either.
    materialization_failure : str
        Why a materialization failed; empty if none did.
    has_backlog : bool
        Whether local runs are to be merged that are too large for the end of a batch.
    restore_s : float
        Time from the answer to begin until the state could be read.
    restored_bytes : int
        What was fetched of the state, as stored.
    """

    task: TaskId
    checksum: bytes
    length: int
    rows: int
    input_rows: int
    name: str
    subtask_s: float
    late_rows: int = 0
    max_event_ms: list[int | None] = []
    timers_to_ms: int = NO_TIME_MS
    is_unchanged: bool = False
    element_counts: dict[str, int] = {}
    copies: dict[str, bytes] = {}
    parts: list[UploadedPart] = []
    measured: Recorded = Recorded()
    levels: list[Level] = []
    has_changeset: bool = True
    job: str = ""
    materialization_failure: str = ""
    has_backlog: bool = False
    restore_s: float = 0.0
    restored_bytes: int = 0

    @property
    def checksums(self) -> list[bytes]:
        """Checksums of all parts."""
        return [*(part.checksum for part in self.parts), self.checksum]

    @property
    def names(self) -> list[str]:
        """The objects that the subtask has written."""
        return [*(part.name for part in self.parts), *([self.name] if self.name else [])]

    @property
    def total_bytes(self) -> int:
        """Size of all parts."""
        return self.length + sum(part.length for part in self.parts)

    @property
    def total_rows(self) -> int:
        """Changes in all parts."""
        return self.rows + sum(part.rows for part in self.parts)


class JobOutcome(StrEnum):
    """What becomes of a materialization that came with an ack."""

    NONE = ""
    TAKEN = "taken"
    """It is part of the checkpoint; the grant has ended."""
    VOID = "void"
    """It does not count, and never will; the grant has ended."""
    OPEN = "open"
    """It cannot be part of this checkpoint: offer it again with the next batch."""


class Acked(msgspec.Struct, frozen=True, tag="acked"):
    """The ack is taken; if it was the last of the batch, the checkpoint is durable.

    Parameters
    ----------
    job : JobOutcome
        What becomes of the materialization that came with it.
    """

    job: JobOutcome = JobOutcome.NONE


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """A clock source asks whether its query needs a batch although no other source has new rows.

    Parameters
    ----------
    clock : str
        The clock's id in the query's offsets.
    reader : str
        Id of the process that asks; another one for every run.
    ends_when_idle : bool
        Whether the query ends once it has read what was there at its start.
    """

    clock: str
    reader: str
    ends_when_idle: bool


class Ticked(msgspec.Struct, frozen=True, tag="ticked"):
    """Whether the query needs a batch."""

    needs_batch: bool


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The call failed with one of statelog's errors."""

    error: str
    message: str
    kind: str
    hint: str


Request = Begin | Fetch | ReadProgress | Ack | Tick
Reply = Begun | Fetched | Acked | Ticked | Failure
