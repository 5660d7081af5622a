"""Draws the pictures of docs/how-it-works.md: ``./dev python docs/pictures.py``."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).with_name("pictures")

_WIDTH: Final = 760
# A picture has a page of its own colour below it, so that it can be read on any background.
_STYLE: Final = """
  text { font: 13px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1f2328; }
  .small { font-size: 11px; }
  .strong { font-weight: 600; }
  .middle { text-anchor: middle; }
  .page { fill: #ffffff; stroke: #d0d7de; }
  .plain { fill: #f6f8fa; stroke: #8c959f; }
  .changes { fill: #fff8c5; stroke: #bf8700; }
  .base { fill: #dafbe1; stroke: #2da44e; }
  .log { fill: #ddf4ff; stroke: #218bff; }
  .gone { fill: none; stroke: #8c959f; stroke-dasharray: 4 3; }
  .line { stroke: #57606a; stroke-width: 1.3; fill: none; }
  marker path { fill: #57606a; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .page { fill: #0d1117; stroke: #30363d; }
    .plain { fill: #21262d; stroke: #6e7681; }
    .changes { fill: #3b2f00; stroke: #d29922; }
    .base { fill: #0f2d17; stroke: #3fb950; }
    .log { fill: #0c2d4f; stroke: #58a6ff; }
    .gone { stroke: #6e7681; }
    .line { stroke: #8b949e; }
    marker path { fill: #8b949e; }
  }
"""


class Picture:
    """Collects shapes; a coordinate is in pixels from the upper left corner."""

    def __init__(self, title: str, height: int) -> None:
        self._title, self._height = title, height
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str) -> None:
        """A rectangle with lines of text in its middle."""
        self._shapes.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>')
        first = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for place, line in enumerate(lines):
            self.text(x + width / 2, first + 16 * place, line, "middle")

    def text(self, x: float, y: float, text: str, kinds: str = "") -> None:
        """A line of text that begins at x, or has its middle there."""
        self._shapes.append(f'<text class="{kinds}" x="{x}" y="{y}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line along points, with its head at the last."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self._shapes.append(f'<polyline class="line" points="{path}" marker-end="url(#head)"/>')

    def svg(self) -> str:
        """The file."""
        body = "\n".join(self._shapes)
        return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {self._height}" role="img">
<title>{escape(self._title)}</title>
<style>{_STYLE}</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 L8 4 L0 8 z"/></marker></defs>
<rect class="page" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{self._height - 1}" rx="8"/>
{body}
</svg>
"""


def durable() -> Picture:
    """How a change becomes durable."""
    picture = Picture("From the rows of a batch to a durable checkpoint", 308)
    picture.box(16, 96, 104, 88, "plain", "Spark:", "rows of", "batch 7")
    for subtask in range(3):
        y = 30 + 84 * subtask
        picture.box(176, y, 188, 64, "plain")
        picture.text(188, y + 20, f"subtask {subtask}", "strong")
        picture.text(188, y + 40, "processor")
        picture.text(188, y + 54, "+ state after 6", "small")
        picture.box(276, y + 26, 78, 28, "changes", "changes")
        picture.arrow((120, 140), (148, 140), (148, y + 32), (174, y + 32))
        picture.arrow((364, y + 32), (396, y + 32), (396, 146), (424, 146))
    picture.box(426, 96, 132, 88, "plain", "coordinator", "in the driver")
    picture.text(620, 40, "the log", "strong")
    for place, batch in enumerate((4, 5, 6, 7)):
        kind = "changes" if batch == 7 else "log"
        picture.box(620, 52 + 44 * place, 122, 36, kind, f"checkpoint {batch}")
    picture.arrow((558, 130), (590, 130), (590, 202), (618, 202))
    picture.arrow((618, 214), (578, 214), (578, 160), (560, 160))
    picture.text(132, 88, "1", "strong")
    picture.text(404, 60, "2 acks", "strong")
    picture.text(566, 122, "3", "strong")
    picture.text(514, 212, "durable")
    picture.arrow((492, 184), (492, 276), (68, 276), (68, 186))
    picture.text(76, 268, "4", "strong")
    picture.text(100, 294, "the tasks end, and Spark commits batch 7")
    return picture


def materialization() -> Picture:
    """A log of changes, and the base that replaces its beginning."""
    picture = Picture("The changelog of a subtask before and after it is materialized", 292)
    picture.text(16, 28, "The state of a subtask after batch 9", "strong")
    picture.box(16, 44, 150, 52, "base", "base", "as of batch 4")
    for place, batch in enumerate(range(5, 10)):
        picture.box(182 + 92 * place, 44, 80, 52, "changes", "changes", f"of batch {batch}")
    picture.text(650, 66, "a restart")
    picture.text(650, 82, "reads all of it")
    picture.text(16, 146, "Materialized, at batch 11", "strong")
    picture.box(16, 162, 150, 52, "base", "base", "as of batch 4")
    picture.box(182, 162, 264, 52, "base", "second level:", "batches 5 to 7, merged")
    for place, batch in enumerate(range(8, 12)):
        picture.box(458 + 70 * place, 162, 62, 52, "changes", "changes", f"of {batch}")
    for place in range(3):
        x = 182 + 92 * place
        picture.arrow((x + 40, 98), (x + 40, 160))
    picture.box(182, 238, 264, 32, "gone", "changes of 5 to 7: deleted")
    picture.text(458, 259, "once no retained checkpoint needs them")
    return picture


def rescaling() -> Picture:
    """Ranges of key groups at two parallelisms."""
    picture = Picture("The ranges of key groups of two and of three subtasks", 310)
    left, width = 130, 600
    picture.box(16, 20, 92, 36, "plain", "key 'ann'")
    picture.arrow((108, 38), (158, 38))
    picture.box(160, 20, 150, 36, "plain", "key hash, 64 bits")
    picture.arrow((310, 38), (360, 38))
    picture.box(362, 20, 210, 36, "plain", "key group: one of 32,768")
    picture.text(16, 104, "2 subtasks", "strong")
    for subtask in range(2):
        picture.box(left + width / 2 * subtask, 84, width / 2 - 4, 34, "base", f"subtask {subtask}")
    picture.text(left, 76, "0", "small")
    picture.text(left + width - 44, 76, "32,767", "small")
    picture.text(16, 166, "stored", "strong")
    for subtask in range(2):
        x = left + width / 2 * subtask
        picture.box(x, 146, width / 2 - 4, 34, "log", f"runs of subtask {subtask}, sorted by key hash")
        picture.arrow((x + width / 4, 118), (x + width / 4, 144))
    picture.text(16, 266, "3 subtasks", "strong")
    for subtask in range(3):
        x = left + width / 3 * subtask
        picture.box(x, 246, width / 3 - 4, 34, "base", f"subtask {subtask}")
    for part in (0.17, 0.42, 0.58, 0.83):
        picture.arrow((left + width * part, 180), (left + width * part, 244))
    picture.text(16, 218, "restart reads")
    picture.text(left, 300, "Each new subtask reads only its own range of the stored runs.", "small")
    return picture


def recovery() -> Picture:
    """What a start does until its first batch runs."""
    picture = Picture("The steps of a start after a crash", 330)
    picture.text(16, 28, "driver", "strong")
    picture.box(16, 40, 220, 54, "log", "1 claims the location;", "the old driver is fenced")
    picture.box(270, 40, 220, 54, "log", "2 reads the log:", "checkpoint 6 is the newest")
    picture.box(524, 40, 220, 54, "plain", "Spark repeats batch 7,", "which it had not committed")
    picture.arrow((236, 67), (268, 67))
    picture.arrow((490, 67), (522, 67))
    picture.text(16, 138, "each subtask", "strong")
    picture.box(16, 150, 220, 54, "plain", "3 asks: which state does", "batch 7 start from?")
    picture.arrow((634, 94), (634, 120), (126, 120), (126, 148))
    picture.box(270, 150, 220, 54, "base", "local files lead to that state:", "nothing is fetched")
    picture.box(270, 226, 220, 54, "changes", "they do not: 4 fetches base", "and changes, checked")
    picture.arrow((236, 170), (268, 170))
    picture.arrow((236, 186), (252, 186), (252, 253), (268, 253))
    picture.box(524, 188, 220, 54, "plain", "5 runs batch 7 on it,", "as the first attempt did")
    picture.arrow((490, 177), (506, 177), (506, 206), (522, 206))
    picture.arrow((490, 253), (506, 253), (506, 224), (522, 224))
    picture.text(16, 308, "The log has no checkpoint 7, so nothing that the crash has left of batch 7 counts.", "small")
    return picture


PICTURES: Final = {picture.__name__: picture for picture in (durable, materialization, rescaling, recovery)}


def main() -> None:
    """Draw all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, picture in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(picture().svg())


if __name__ == "__main__":
    main()
