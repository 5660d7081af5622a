"""Sessions of clicks: when was each visit of a user, and how many clicks had it?

Clicks arrive up to ten minutes late and out of order. A session ends half an hour after its last click. It is returned
once the watermark has passed this time, and its state is removed. Visits that are still open when the input ends are
not returned yet.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from pyspark.sql import SparkSession

import statelog
from examples.program import Rows, after, main, read_batches, run, write_batches

GAP_MIN: Final = 30
DELAY_MIN: Final = 15
HOURS_PER_BATCH: Final = 4


def make_clicks() -> list[Rows]:
    """The clicks of a day, in order of arrival."""
    random = Random(1)
    clicks: list[tuple[float, dict[str, Any]]] = []
    for user in ("ann", "bob", "cid", "dora", "eve", "finn"):
        minute = random.uniform(0, 240)
        while minute < 24 * 60:
            for _ in range(random.randint(1, 12)):
                clicks.append((minute + random.uniform(0, 10), {"user": user, "at": after(minute)}))
                minute += random.uniform(0.5, 20)
            minute += random.uniform(20, 400)  # some visits follow so soon that they continue the one before
    batches: list[Rows] = [[] for _ in range(24 // HOURS_PER_BATCH)]
    for arrival, click in sorted(clicks, key=lambda each: each[0]):
        if arrival < 24 * 60:
            batches[int(arrival) // 60 // HOURS_PER_BATCH].append(click)
    return batches


def example(spark: SparkSession, folder: Path) -> pd.DataFrame:
    """The sessions that have ended."""
    write_batches(folder / "clicks", make_clicks())
    clicks = read_batches(spark, folder / "clicks", "user string, at timestamp")
    clicks = clicks.withWatermark("at", f"{DELAY_MIN} minutes")
    visits = statelog.key_by(clicks, "user").window(statelog.SessionWindows(GAP_MIN * 60_000))
    sessions = run(visits.agg(statelog.Count().alias("clicks")), folder)
    return sessions.sort_values(["user", "window_start"], ignore_index=True)


def picture(sessions: pd.DataFrame, axes: Axes) -> None:
    """A line of time per user: its sessions with the number of clicks, coloured by the batch that returned them."""
    midnight = after(0).replace(tzinfo=None)
    for session in sessions.to_dict("records"):
        start, end = ((session[name] - midnight).total_seconds() / 3600 for name in ("window_start", "window_end"))
        axes.barh(session["user"], end - start, left=start, height=0.6, color=f"C{session['batch']}")
        middle = (start + end) / 2
        axes.text(middle, session["user"], str(session["clicks"]), ha="center", va="center", color="white", size=7)
    axes.invert_yaxis()
    axes.set(
        xlabel="hour of the day; a colour per batch that returned the session", xlim=(0, 24), xticks=range(0, 25, 4)
    )
    axes.set_title("Sessions and their clicks", loc="left")


if __name__ == "__main__":
    main(example, picture, __doc__)
