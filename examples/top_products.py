"""The three best-selling products of the last hour, every quarter of an hour.

Two operators: sliding windows add up the sales of each product, and ``top`` ranks the products of each window. The sums
of a window all come in one batch, once the watermark has passed its end. So a ranking is complete when it is returned.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Final

import pandas as pd
from matplotlib.axes import Axes
from pyspark.sql import SparkSession

import statelog
from examples.program import Rows, after, main, read_batches, run, write_batches

SIZE_MIN: Final = 60
SLIDE_MIN: Final = 15
DELAY_MIN: Final = 5
TOP: Final = 3
BATCHES: Final = 5
MINUTES_PER_BATCH: Final = 60


def make_sales() -> list[Rows]:
    """Sales of some products, each of which has its hour."""
    random = Random(3)
    products = {
        name: random.uniform(0, BATCHES * MINUTES_PER_BATCH)
        for name in ("apples", "bread", "cheese", "dates", "eggs", "figs")
    }
    batches: list[Rows] = []
    for batch in range(BATCHES):
        rows = []
        for minute in sorted(random.uniform(0, MINUTES_PER_BATCH) + batch * MINUTES_PER_BATCH for _ in range(200)):
            weights = [1 / (1 + abs(minute - best) / 30) for best in products.values()]
            [product] = random.choices(list(products), weights)
            rows.append({"product": product, "at": after(minute), "cents": random.randint(100, 5_000)})
        batches.append(rows)
    return batches


def example(spark: SparkSession, folder: Path) -> pd.DataFrame:
    """The ranking of each window that is complete."""
    write_batches(folder / "sales", make_sales())
    sales = read_batches(spark, folder / "sales", "product string, at timestamp, cents long")
    sales = sales.withWatermark("at", f"{DELAY_MIN} minutes")
    windows = statelog.SlidingWindows(SIZE_MIN * 60_000, SLIDE_MIN * 60_000)
    sums = statelog.key_by(sales, "product", uid="sums").window(windows).agg(statelog.Sum("cents").alias("cents"))
    # A window's ranking is never needed again, so its state may go when the next batch comes.
    ranking = statelog.key_by(sums, "window_end", uid="ranking").top(TOP, by="cents", ttl=1)
    best = run(ranking.select("window_end", "rank", "product", "cents"), folder)
    return best.sort_values(["window_end", "rank"], ignore_index=True)


def picture(ranking: pd.DataFrame, axes: Axes) -> None:
    """A line per product through its ranks."""
    ends = pd.Index(sorted(ranking.window_end.unique()))
    for product, rows in ranking.groupby("product"):
        ranks = rows.set_index("window_end")["rank"].reindex(ends)
        axes.plot(range(len(ends)), ranks, marker="o", markersize=6, label=product)
    labels = [f"{end:%H:%M}" for end in ends]
    axes.set(
        xticks=range(len(ends)), xticklabels=labels, yticks=range(1, TOP + 1), ylabel="rank", xlabel="end of the hour"
    )
    axes.tick_params(axis="x", rotation=90)
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


if __name__ == "__main__":
    main(example, picture, __doc__)
