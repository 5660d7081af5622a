"""An unkeyed operator's task: begin, read the snapshot, process, ack. No Spark here."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import pyarrow as pa

from statelog.errors import CorruptionError, ErrorKind, ProtocolError
from statelog.local.restore import read_segment
from statelog.local.runs import LocalSnapshots
from statelog.local.use import remove_other_parallelisms
from statelog.log.references import SegmentRef
from statelog.metrics import Metric, Step
from statelog.operators.unkeyed.processor import OperatorContext
from statelog.operators.unkeyed.snapshot import Elements, Snapshot, StateElements, encode_snapshot
from statelog.operators.unkeyed.states import OperatorStateMode
from statelog.operators.unkeyed.subtask import UnkeyedInput, UnkeyedOperator, UnkeyedSubtask
from statelog.rpc.messages import Ack, Acked, Begun, SnapshotView, TaskTimes
from statelog.runs import digests
from statelog.stopwatch import Part
from statelog.tasks.attempt import Attempt, require_reply


@dataclass(frozen=True)
class UnkeyedTask:
    """The work of one attempt."""

    attempt: Attempt
    operator: UnkeyedOperator

    def run(self, read: UnkeyedInput) -> Generator[pa.RecordBatch, None, Acked]:
        """Process the batch, yield the output, and return the coordinator's reply to the ack.

        The last output batch follows the reply. After a StatelogError, nothing of the attempt counts.
        """
        attempt, task = self.attempt, self.attempt.task
        begun = attempt.begin(read.count, read.time_ms)
        if begun is None:
            return Acked()
        view = begun.view.snapshot_view
        if view is None:
            raise ProtocolError("The coordinator answered begin with another kind of state.")
        with attempt.local_in_use(attempt.local_of(begun.view.identity)):
            stored = self._stored(begun, view)
            attempt.step(Step.RESTORED)
            context = OperatorContext(
                subtaskIndex=task.subtask,
                parallelism=attempt.parallelism,
                batchId=task.batch,
                batchTimeMs=begun.permit.batch_time_ms,
                isRestored=view.is_restored,
                isRedistributed=view.is_redistributed,
            )
            subtask = UnkeyedSubtask(self.operator, stored, context)
            held: pa.RecordBatch | None = None
            with attempt.stopwatch.counting(Part.PROCESSOR):
                for output in subtask.process(read):
                    if held is not None:
                        with attempt.stopwatch.counting(Part.WAIT):
                            yield held
                    held = output
            reply = self._ack(begun, view, stored, subtask, read.count)
            if held is not None:
                yield held
        return reply

    def _local(self, begun: Begun) -> LocalSnapshots:
        return LocalSnapshots(self.attempt.local_of(begun.view.identity))

    def _stored(self, begun: Begun, view: SnapshotView) -> dict[str, list[Elements]]:
        """The elements before the batch, by state."""
        if view.is_redistributed:
            remove_other_parallelisms(self.attempt.local_of(begun.view.identity))
        found = [self._local(begun).read(segment.checksum) for segment in view.snapshots]
        if None in found:
            self.attempt.measurements.count(Metric.STATE_FETCHES)
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
        data = read_segment(self.attempt.open_store(begun.permit.store), segment)
        if view.slices is None:
            # If the batch does not change the snapshot, the next batch starts from it again.
            self._local(begun).write(segment.checksum, data, self.attempt.task.batch, self.attempt.token)
        return data

    def _ack(
        self,
        begun: Begun,
        view: SnapshotView,
        stored: dict[str, list[Elements]],
        subtask: UnkeyedSubtask,
        input_rows: int,
    ) -> Acked:
        attempt, task = self.attempt, self.attempt.task
        before = view.snapshots[0].checksum if view.slices is None else None
        if before is not None and not subtask.is_changed:
            sections, data, checksum = [parts[0].section for parts in stored.values()], b"", before
        else:
            with attempt.stopwatch.counting(Part.ENCODE):
                sections = subtask.sections()
                data = encode_snapshot(sections)
                checksum = digests.checksum(data)
        is_unchanged = checksum == before
        name = "" if is_unchanged else self._store_snapshot(begun, checksum, data)
        self._local(begun).sweep([checksum] if before is None else [before, checksum])
        length, rows = (0, 0) if is_unchanged else (len(data), sum(section.count for section in sections))
        attempt.step(Step.ACKING)
        ack = Ack(
            task=task,
            segments=[SegmentRef(task.subtask, task.attempt, checksum, 0, length, rows, input_rows, name)],
            is_unchanged=is_unchanged,
            element_counts={section.state.name: section.count for section in sections},
            broadcast_checksums={section.state.name: section.checksum for section in sections if _is_copy(section)},
            measured=attempt.measurements.take(),
            times=TaskTimes.of(attempt.stopwatch),
            state_sizes={section.state.name: (section.count, len(section.data)) for section in sections},
        )
        reply = require_reply(attempt.call(ack, b"" if is_unchanged or name else data), Acked, "an ack")
        attempt.step(Step.ACKED)
        return reply

    def _store_snapshot(self, begun: Begun, checksum: bytes, data: bytes) -> str:
        """Write the snapshot to the local disk for the next batch, and to the store if it is large.

        Returns its name in the store; empty if it is sent with the ack.
        """
        stopwatch = self.attempt.stopwatch
        with stopwatch.counting(Part.ENCODE):
            self._local(begun).write(checksum, data, self.attempt.task.batch, self.attempt.token)
        if len(data) <= begun.permit.inline_bytes:
            return ""
        name = f"{begun.permit.upload_prefix}/{self.attempt.file_token}.snapshot"
        with stopwatch.counting(Part.UPLOAD):
            self.attempt.open_store(begun.permit.store).put(name, data)
        return name


def _is_copy(section: StateElements) -> bool:
    return section.state.kind == OperatorStateMode.BROADCAST and section.count > 0
