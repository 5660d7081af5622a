"""An operator's own watermark: how far event time has come, as of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WatermarkPolicy:
    """The largest event time seen minus a delay; the smallest of all inputs counts.

    It advances between batches: what a batch has seen moves the watermark of the next one. It never goes back,
    also when the delay is raised or an input is added.

    Parameters
    ----------
    delay_ms : int
        How much later than the newest row a row may come.
    inputs : int
        Number of inputs. While one of them has had no row yet, the watermark stands still.
    """

    delay_ms: int
    inputs: int = 1

    def advance(self, before_ms: int, max_event_ms: Sequence[int | None]) -> int:
        """The watermark after a batch.

        Parameters
        ----------
        before_ms : int
            The watermark of the batch.
        max_event_ms : sequence of (int or None)
            The largest event time seen so far of each input.
        """
        seen = [time_ms for time_ms in max_event_ms[: self.inputs] if time_ms is not None]
        if len(seen) < self.inputs:
            return before_ms
        return max(before_ms, min(seen) - self.delay_ms)

    def combine(self, of_subtasks: Iterable[Sequence[int | None]]) -> list[int | None]:
        """The largest event time of each input over all subtasks, and what was seen before."""
        largest: list[int | None] = [None] * self.inputs
        for times in of_subtasks:
            for index, time_ms in enumerate(times[: self.inputs]):
                if time_ms is not None:
                    held = largest[index]
                    largest[index] = time_ms if held is None else max(held, time_ms)
        return largest
