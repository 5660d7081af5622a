"""An unkeyed operator's task: begin, read the snapshot, process, ack. No Spark here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from statelog.checkpoint.protocol import Ack, Begin, Begun, Reply, Request, TaskId
from statelog.checkpoint.redistribution import SnapshotView
from statelog.clock import Clock
from statelog.errors import CorruptionError, ErrorKind, ProtocolError
from statelog.local.restore import read_segment
from statelog.local.snapshots import LocalSnapshots
from statelog.local.use import in_use, is_turn_to_remove, remove_other_parallelisms, remove_unused
from statelog.log.references import SegmentRef
from statelog.metrics import Measurements, Metric, Step
from statelog.operators.unkeyed.processor import OperatorContext
from statelog.operators.unkeyed.snapshot import Elements, Snapshot, StateElements, encode_snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.operators.unkeyed.subtask import UnkeyedInput, UnkeyedOperator, UnkeyedSubtask
from statelog.options import Options
from statelog.runs import digests
from statelog.storage import Store


@dataclass(frozen=True)
class UnkeyedTask:
    """One attempt of one subtask in one batch."""

    task: TaskId
    partition: int
    """Spark's partition id."""
    parallelism: int
    operator: UnkeyedOperator
    options: Options
    call: Callable[[Request, bytes], Reply]
    """Sends a request and its payload to the coordinator."""
    local: LocalSnapshots
    open_store: Callable[[str], Store]
    """Opens the store of a location."""
    clock: Clock
    token: str
    """Unique among all attempts."""
    measurements: Measurements = field(default_factory=Measurements)

    def run(self, read: UnkeyedInput) -> Iterator[pa.RecordBatch]:
        """Process the batch and yield the output.

        The last output batch follows the coordinator's reply to the ack. After a StatelogError nothing of the attempt
        counts.
        """
        begun, view = self._begin(read)
        with in_use(self.local.directory, self.task.batch):
            yield from self._run(read, begun, view)
        if is_turn_to_remove(self.task.batch, self.task.subtask, self.parallelism):
            remove_unused(self.local.directory, self.task.batch)

    def _run(self, read: UnkeyedInput, begun: Begun, view: SnapshotView) -> Iterator[pa.RecordBatch]:
        stored = self._stored(begun, view)
        self._step(Step.RESTORED)
        context = OperatorContext(
            subtaskIndex=self.task.subtask,
            parallelism=self.parallelism,
            batchId=self.task.batch,
            batchTimeMs=begun.batch_time_ms,
            isRestored=view.is_restored,
            isRedistributed=view.is_redistributed,
        )
        subtask = UnkeyedSubtask(self.operator, stored, context)
        held: pa.RecordBatch | None = None
        for output in subtask.process(read):
            if held is not None:
                yield held
            held = output
        self._ack(begun, view, stored, subtask, read.count)
        if held is not None:
            yield held

    def _begin(self, read: UnkeyedInput) -> tuple[Begun, SnapshotView]:
        reply = self.call(Begin(self.task, self.partition, read.count, read.time_ms), b"")
        if not isinstance(reply, Begun) or reply.snapshot_view is None:
            raise ProtocolError(f"The coordinator answered begin with {type(reply).__name__} of another kind of state.")
        return reply, reply.snapshot_view

    def _stored(self, begun: Begun, view: SnapshotView) -> dict[str, list[Elements]]:
        """The elements before the batch, by state."""
        if view.is_redistributed:
            remove_other_parallelisms(self.local.directory)
        found = [self.local.read(segment.checksum) for segment in view.snapshots]
        if None in found:
            self.measurements.count(Metric.STATE_FETCHES)
        snapshots = [
            Snapshot(self._fetch(begun, view, segment) if data is None else data, segment.name)
            for segment, data in zip(view.snapshots, found, strict=True)
        ]
        if view.slices is None:
            return {name: [Elements.all_of(section)] for name, section in snapshots[0].sections.items()}
        stored: dict[str, list[Elements]] = {}
        for piece in view.slices:
            section = snapshots[piece.snapshot].sections.get(piece.state)
            if section is None or section.count < piece.first + piece.count:
                raise CorruptionError(
                    f"{view.snapshots[piece.snapshot].name}: the snapshot does not hold the {piece.count} elements of"
                    f" state '{piece.state}' that the log entry names.",
                    kind=ErrorKind.FORMAT,
                    hint="Please report it.",
                )
            stored.setdefault(piece.state, []).append(Elements(section, piece.first, piece.count))
        return stored

    def _fetch(self, begun: Begun, view: SnapshotView, segment: SegmentRef) -> bytes:
        data = read_segment(self.open_store(begun.store), segment)
        if view.slices is None:
            # If the batch does not change the snapshot, the next batch starts from it again.
            self.local.write(segment.checksum, data, self.task.batch, self.token)
        return data

    def _ack(
        self,
        begun: Begun,
        view: SnapshotView,
        stored: dict[str, list[Elements]],
        subtask: UnkeyedSubtask,
        input_rows: int,
    ) -> None:
        started_s = self.clock.monotonic_s()
        before = view.snapshots[0].checksum if view.slices is None else None
        if before is not None and not subtask.is_changed:
            sections, data, checksum = [parts[0].section for parts in stored.values()], b"", before
        else:
            sections = subtask.sections()
            data = encode_snapshot(sections)
            checksum = digests.checksum(data)
        is_unchanged = checksum == before
        name = "" if is_unchanged else self._store_snapshot(begun, checksum, data)
        self.local.sweep([checksum] if before is None else [before, checksum], self.task.batch)
        length, rows = (0, 0) if is_unchanged else (len(data), sum(section.count for section in sections))
        self._step(Step.ACKING)
        ack = Ack(
            task=self.task,
            segments=[SegmentRef(self.task.subtask, self.task.attempt, checksum, 0, length, rows, input_rows, name)],
            subtask_s=self.clock.monotonic_s() - started_s,
            is_unchanged=is_unchanged,
            element_counts={section.state.name: section.count for section in sections},
            broadcast_checksums={section.state.name: section.checksum for section in sections if _is_copy(section)},
            measured=self.measurements.take(),
        )
        self.call(ack, b"" if is_unchanged or name else data)
        self._step(Step.ACKED)

    def _store_snapshot(self, begun: Begun, checksum: bytes, data: bytes) -> str:
        """Write the snapshot to the local disk for the next batch, and to the store if it is large.

        Returns its name in the store; empty if it is sent with the ack.
        """
        self.local.write(checksum, data, self.task.batch, self.token)
        if len(data) <= begun.inline_bytes:
            return ""
        name = f"{begun.upload_prefix}/{self.task.batch}-{self.token}.snapshot"
        self.open_store(begun.store).put(name, data)
        return name

    def _step(self, step: Step) -> None:
        self.options.observer.step(step, self.task.batch, self.task.subtask)


def _is_copy(section: StateElements) -> bool:
    return section.state.kind == OperatorStateMode.BROADCAST and section.count > 0
