"""An operator's own watermark: how far event time has come at a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WatermarkPolicy:
    """Computes the watermark: the largest event time seen, minus a delay; with several inputs the smallest counts.

    The watermark advances between batches: the rows of a batch move the watermark of the next one. It never goes back,
    even if the delay is raised or an input is added.
    """

    delay_ms: int
    """How far a row may be behind the newest one."""
    inputs: int = 1
    """Number of inputs. Until each of them has had a row, the watermark stands still."""

    def advance(self, before_ms: int, max_event_ms: Sequence[int | None]) -> int:
        """The watermark after a batch.

        `before_ms` is the watermark of the batch, `max_event_ms` the largest event time of each input up to its end.
        """
        seen = [time_ms for time_ms in max_event_ms[: self.inputs] if time_ms is not None]
        if len(seen) < self.inputs:
            return before_ms
        return max(before_ms, min(seen) - self.delay_ms)

    def combine(self, of_subtasks: Iterable[Sequence[int | None]]) -> list[int | None]:
        """The largest event time of each input, over all subtasks and the checkpoint before."""
        largest: list[int | None] = [None] * self.inputs
        for times in of_subtasks:
            for index, time_ms in enumerate(times[: self.inputs]):
                if time_ms is not None:
                    held = largest[index]
                    largest[index] = time_ms if held is None else max(held, time_ms)
        return largest
