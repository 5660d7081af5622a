"""The demo's picture: throughput and checkpoints over time, with the kills."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.flights.supervisor import Run

__all__ = ["draw_timeline", "write_timeline"]


def draw_timeline(runs: list[Run]) -> Figure:
    """Draw the rows per second of each batch and the durations of each checkpoint, by seconds since the first start."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    rates, durations = figure.subplots(2, 1, sharex=True)
    begun_s = runs[0].started_s
    for run in runs:
        batches, checkpoints = run.events_of("batch"), run.events_of("checkpoint")
        # Points of one start are joined, so that the time until the next one's first batch is a gap.
        rates.plot(
            [event["at_s"] - begun_s for event in batches],
            [event["rows"] / event["batch_s"] for event in batches],
            color="C0",
            marker=".",
        )
        for field, color in (("commit_s", "C1"), ("subtask_s", "C2")):
            times_s = [event["at_s"] - begun_s for event in checkpoints]
            durations.plot(times_s, [event[field] * 1000 for event in checkpoints], ".", color=color)
    rates.set(title="flights per second of each batch", ylim=(0, None))
    durations.set(title="checkpoints, ms", xlabel="seconds since the first start", yscale="log")
    durations.plot([], [], ".", color="C1", label="last ack received to entry durable")
    durations.plot([], [], ".", color="C2", label="slowest subtask: user code done to ack sent")
    durations.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=2)
    _mark(runs, rates, durations)
    return figure


def _mark(runs: list[Run], rates: Axes, durations: Axes) -> None:
    """Mark kills with a line, and starts of the job with another one."""
    for run in runs:
        for axes in (rates, durations):
            axes.axvline(run.started_s - runs[0].started_s, color="grey", linewidth=0.8, linestyle=":", gid="start")
        for kill, killed_s in run.killed_s.items():
            at_s = killed_s - runs[0].started_s
            for axes in (rates, durations):
                axes.axvline(at_s, color="C3", linewidth=1, gid="kill")
            label = f" {kill.target} killed"
            rates.text(at_s, 0.02, label, color="C3", rotation=90, transform=rates.get_xaxis_transform(), va="bottom")


def write_timeline(runs: list[Run], folder: Path) -> Path:
    """Write the picture into a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "timeline.svg"
    with mpl.rc_context({"svg.fonttype": "none"}):  # text stays text
        draw_timeline(runs).savefig(path, format="svg")
    return path
