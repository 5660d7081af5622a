"""A benchmark's result as a Markdown page, with its plots as PNG files beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame import Plot, Result


def write_report(folder: Path, name: str, heading: Sequence[str], result: Result) -> None:
    """Write the page of a benchmark, and its plots, into a folder, which is made if there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [*heading, "", *_table(result.rows), "", *(f"- {line}" for line in [*result.remarks, *result.targets])]
    for plot in result.plots:
        file = f"{name}-{plot.name.replace(' ', '-')}.png"
        _draw(plot, folder / file)
        lines += ["", f"![{plot.name}]({file})"]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    head, *_ = rows
    cells = [list(head), ["---"] * len(head), *([*row.values()] for row in rows)]
    return [f"| {' | '.join(row)} |" for row in cells]


def _draw(plot: Plot, file: Path) -> None:
    # Not at the top: it takes a second. The canvas of files, which needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for label, points in plot.lines.items():
        axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel=plot.x, ylabel=plot.y, title=plot.name, yscale="log" if plot.is_logarithmic else "linear")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
