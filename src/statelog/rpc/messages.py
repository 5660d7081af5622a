"""The messages between tasks and the coordinator: MessagePack, never pickle."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

import msgspec

from statelog.history.restore_plan import RestorePlan
from statelog.local.materializer import MaintenanceRequest
from statelog.log.references import Level, SegmentRef
from statelog.metrics import Recorded
from statelog.runs.times import NO_TIME_MS
from statelog.stopwatch import Part, Stopwatch


class SnapshotSlice(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive elements of a state in a snapshot."""

    snapshot: int
    """Index of the snapshot in its :class:`SnapshotView`."""
    state: str
    first: int
    count: int


class SnapshotView(msgspec.Struct, frozen=True):
    """The operator state that a subtask starts a batch from."""

    snapshots: list[SegmentRef] = []
    slices: list[SnapshotSlice] | None = []
    """The elements to take from the snapshots, in order; None for the only snapshot, unchanged."""
    is_restored: bool = False
    """Whether an earlier start left the state."""
    is_redistributed: bool = False
    """Whether that start had another parallelism."""


class TaskId(msgspec.Struct, frozen=True):
    """Names the calling task, in Spark's ids."""

    query_id: str
    run_id: str
    uid: str
    instance: str
    """The operator's place in the driver program; it distinguishes two operators with the same uid."""
    batch: int
    subtask: int
    attempt: int
    """Spark's task attempt id."""

    @property
    def name(self) -> str:
        """The task's name in messages."""
        return f"operator '{self.uid}', subtask {self.subtask}, batch {self.batch}"


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A subtask begins a batch."""

    task: TaskId
    partition: int
    """Spark's partition id of the task."""
    input_rows: int
    batch_time_ms: int | None
    """The batch time in the task's rows, milliseconds since the Unix epoch; None without rows."""
    token: str
    """The attempt's own. A call that is repeated has the same; another partition in the same task has another one."""


class Witness(msgspec.Struct, frozen=True, array_like=True):
    """An object that the driver has written to the location; a process that does not see it uses another place."""

    name: str
    head: bytes
    """The first bytes of the object."""


class View(msgspec.Struct, frozen=True):
    """The state that a subtask starts a batch from: a pure function of the log before it, and of the operator."""

    identity: str
    """The operator's identity, which names its folders and local directories."""
    genesis: bytes
    """Digest of the subtask's empty state."""
    head: bytes
    """Digest of the subtask's state before the batch."""
    generations: dict[str, int] = {}
    """How often each state was deleted, by name, deletions of this start included."""
    certain_generations: dict[str, int] = {}
    """The same, as of the previous checkpoint. Only these deletions are final, so only they may remove stored state."""
    closed_ms: int = NO_TIME_MS
    """Earlier starts with other settings have closed the windows that end up to this time."""
    expires_by: dict[str, str] = {}
    """For each state that no longer has a TTL, the kind of time by which its existing values still expire."""
    snapshot_view: SnapshotView | None = None
    """State of an unkeyed operator before the batch; its digests are empty."""


class Permit(msgspec.Struct, frozen=True):
    """What a start adds to a view: how a subtask runs the batch, and where it may write."""

    epoch: int
    inline_bytes: int
    """Changesets up to this size are sent with the ack."""
    upload_prefix: str
    """Larger changesets are written under this prefix."""
    store: str
    """Location of the store."""
    batch_time_ms: int
    watermark_ms: int
    """Timers up to this watermark fire in the batch."""
    late_watermark_ms: int = 0
    """Rows up to this watermark are late."""
    timers_after_ms: int = NO_TIME_MS
    """No timer up to this time is left to fire."""
    arrivals_after_ms: int = NO_TIME_MS
    """No arrival up to this time is left whose limit is over."""
    initial: str = ""
    """The object with the subtask's rows of the initial state, an Arrow IPC stream; empty if there are none."""
    maintenance: MaintenanceRequest | None = None
    """Work on keyed state after the batch; before its end if the changelog is off."""
    witness: Witness | None = None
    """The object that each worker process checks once per start, before it uses the location."""


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """The state that a subtask starts from, and how it runs the batch."""

    view: View
    permit: Permit


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """The batch's stored checkpoint and output stay as they are: the subtask has nothing to do."""


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """A subtask asks for the state that it lacks."""

    task: TaskId
    known: list[bytes]
    """Digests of the states that the subtask has."""


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """How to get from one of the known states to the state before the batch."""

    missing: RestorePlan


class ReadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A subtask has read a part of the state that it lacks."""

    task: TaskId
    read_bytes: int
    known_bytes: int
    """Bytes to read in total, as far as is known."""


class CheckOwner(msgspec.Struct, frozen=True, tag="owner"):
    """A subtask has found damage, and asks whether its start still owns the location; a newer one deletes objects."""

    task: TaskId


class DiskFailed(msgspec.Struct, frozen=True, tag="disk"):
    """A subtask's attempt fails because local files cannot be stored where it runs."""

    task: TaskId
    stage: int
    """Spark's stage id of the task."""


class TaskTimes(msgspec.Struct, frozen=True, array_like=True):
    """Where a task's time went, in seconds; :class:`statelog.metrics.SubtaskMetrics` has the meanings."""

    read_s: float = 0.0
    processor_s: float = 0.0
    encode_s: float = 0.0
    upload_s: float = 0.0
    wait_s: float = 0.0
    """Up to the ack."""

    @classmethod
    def of(cls, stopwatch: Stopwatch) -> Self:
        """The times so far."""
        return cls(**{part: stopwatch.spent_s(part) for part in Part})


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """A subtask has processed all its rows.

    The payload of the message holds the changeset unless it is an object, then the runs of `levels` without a name. For
    an unkeyed operator, read "snapshot" for "changeset".
    """

    task: TaskId
    segments: list[SegmentRef]
    """At least one segment. All but the last are objects; if the last has no name, it is in the payload."""
    late_rows: int = 0
    """Number of late rows, dropped or returned."""
    max_event_ms: list[int | None] = []
    """Largest event time of each input, late rows included, None for an input without rows; empty if the operator has
    no watermark of its own."""
    timers_to_ms: int = NO_TIME_MS
    """No timer up to this time is left to fire after the batch."""
    arrivals_to_ms: int = NO_TIME_MS
    """No arrival up to this time is left after the batch."""
    is_unchanged: bool = False
    """Whether the subtask's snapshot is still the one that it started from; then no bytes follow."""
    element_counts: dict[str, int] = {}
    """Number of elements in the snapshot, by state."""
    broadcast_checksums: dict[str, bytes] = {}
    """Checksum of each broadcast state; all subtasks must agree on it."""
    measured: Recorded = Recorded()
    """Measurements of the subtask's requests to the store."""
    levels: list[Level] = []
    """The subtask's state, newly materialized as of this batch or an earlier one; empty if none is."""
    has_changeset: bool = True
    """Whether a changeset holds the changes; otherwise the levels do, or there are none."""
    job: str = ""
    """Grant of the job that made the levels or failed; empty without either."""
    materialization_failure: str = ""
    """Why a materialization failed; empty if none did."""
    has_backlog: bool = False
    """Whether local runs are waiting to be merged that are too large for a merge at the end of a batch."""
    restore_s: float = 0.0
    """Time from the reply to Begin until the state could be read."""
    restored_bytes: int = 0
    """Size of the fetched state, as stored."""
    times: TaskTimes = TaskTimes()
    state_sizes: dict[str, tuple[int, int]] = {}
    """Rows and bytes of each state, by stored name."""
    hot_keys: list[tuple[int, int, bytes]] = []
    """Rows, key group and key of the keys with the most rows; the key is empty if it must not be reported."""
    hot_key_groups: list[tuple[int, int]] = []
    """Rows and key group."""
    adds_floats: bool = False
    """Whether another attempt may give results with different last digits."""

    @property
    def subtask_s(self) -> float:
        """Time spent on the checkpoint, in seconds."""
        return self.times.encode_s + self.times.upload_s

    @property
    def last(self) -> SegmentRef:
        """The last segment: the only one that may be inline, and the one that counts the input rows."""
        return self.segments[-1]

    @property
    def checksums(self) -> list[bytes]:
        """Checksums of all segments, in order."""
        return [segment.checksum for segment in self.segments]

    @property
    def names(self) -> list[str]:
        """The changeset's objects."""
        return [segment.name for segment in self.segments if segment.name]

    @property
    def total_bytes(self) -> int:
        """Size of all segments."""
        return sum(segment.length for segment in self.segments)

    @property
    def total_rows(self) -> int:
        """Changes in all segments."""
        return sum(segment.rows for segment in self.segments)


class JobOutcome(StrEnum):
    """The coordinator's decision on the materialization that came with an ack."""

    NONE = ""
    ACCEPTED = "taken"
    """It is part of the checkpoint; the grant has ended."""
    VOID = "void"
    """It does not count, and never will; the grant has ended."""
    OPEN = "open"
    """It cannot be part of this checkpoint: send it again with the next batch."""


class Acked(msgspec.Struct, frozen=True, tag="acked"):
    """The coordinator has accepted the ack. After the last one of the query's batch the checkpoint is durable."""

    job: JobOutcome = JobOutcome.NONE
    numbers: list[float | None] = []
    """The operator's numbers in the checkpoint, in the order of :func:`statelog.metrics.meanings`.

    Empty until all of its subtasks have acked.
    """


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """A clock source asks whether its query needs a batch even though no other source has new rows."""

    clock: str
    """The clock's id in the query's offsets."""
    reader: str
    """Id of the asking process, new for every start."""
    ends_when_idle: bool
    """Whether the query ends once it has read the data that existed at its start."""

    @property
    def name(self) -> str:
        """The source's name in messages."""
        return f"the clock source {self.reader}"


class Ticked(msgspec.Struct, frozen=True, tag="ticked"):
    """Whether the query needs a batch."""

    needs_batch: bool


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """A process asks whether the driver is there, and for its time."""

    name: str
    """The name of the asking process, for messages."""


class Pinged(msgspec.Struct, frozen=True, tag="pinged"):
    """The driver is there."""

    now_s: float
    """Its wall clock, seconds since the Unix epoch."""


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The call failed with one of statelog's errors."""

    error: str
    message: str
    kind: str
    hint: str


TaskRequest = Begin | Fetch | ReadProgress | CheckOwner | DiskFailed | Ack
"""The requests and reports of an operator's tasks to its coordinator."""
Request = TaskRequest | Tick | Ping
Reply = Begun | Kept | Fetched | Acked | Ticked | Pinged | Failure
