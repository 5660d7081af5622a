"""Fraud rules that change while payments flow: broadcast state, keyed state and timers.

A thief tries a stolen card with a small payment, and soon after makes a large one. What is small, large and soon is a
rule of each country; rules are a stream of their own. The first operator keeps them as broadcast state and applies the
newest rule to each payment. The second keeps the last small payment of each card, and a timer for the moment when it is
forgotten. It returns a verdict for each: ``alarm`` at the time of the large payment, or ``cleared`` at the timer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import statelog
from examples.program import Rows, after, main, read_batches, run, write_batches

PAYMENT: Final = "card string, country string, at timestamp, cents long"
RULE: Final = "country string, small long, large long, within_s long"
VERDICT: Final = "card string, verdict string, small_at timestamp, at timestamp"
BATCHES: Final = 5
MINUTES_PER_BATCH: Final = 10
DELAY_S: Final = 5


def make_payments() -> list[Rows]:
    """Payments in order of time, some of them by thieves."""
    random = Random(4)
    payments: Rows = []
    for number in range(14):
        minute, country = random.uniform(0, 4), random.choice(("DE", "FR", "PT"))
        while minute < BATCHES * MINUTES_PER_BATCH:
            card = {"card": f"card {number:02}", "country": country}
            payments.append({**card, "at": after(minute), "cents": round(10 ** random.uniform(1.8, 4.6))})
            if random.random() < 0.15:
                payments.append({**card, "at": after(minute + 0.3), "cents": random.randint(50, 99)})
                payments.append(
                    {**card, "at": after(minute + 0.5 + random.random()), "cents": random.randint(9_000, 60_000)}
                )
            minute += random.uniform(1.5, 6)
    batches: list[Rows] = [[] for _ in range(BATCHES)]
    for payment in sorted(payments, key=lambda each: (each["at"], each["card"])):
        batch = int((payment["at"] - after(0)).total_seconds()) // 60 // MINUTES_PER_BATCH
        if batch < BATCHES:
            batches[batch].append(payment)
    return batches


def make_rules() -> list[Rows]:
    """The rules that come with each batch of payments: Portugal has none at first, Germany's becomes stricter."""
    germany = {"country": "DE", "small": 100, "large": 30_000, "within_s": 60}
    france = {"country": "FR", "small": 100, "large": 20_000, "within_s": 90}
    portugal = {"country": "PT", "small": 200, "large": 10_000, "within_s": 120}
    return [[germany, france], [], [portugal], [{**germany, "large": 9_000, "within_s": 120}], []]


class ApplyRules(statelog.OperatorProcessor):
    """Says of each payment whether it is small, large or usual in its country."""

    def init(self, handle: statelog.OperatorHandle) -> None:
        self.rules = handle.getBroadcastState("rules", "country string", "small long, large long, within_s long")

    def processBroadcast(self, rows: Iterator[Row], context: statelog.OperatorContext) -> None:
        for rule in rows:
            self.rules.put((rule.country,), (rule.small, rule.large, rule.within_s))

    def process(self, rows: Iterator[Row], context: statelog.OperatorContext) -> Iterator[tuple[Any, ...]]:
        for payment in rows:
            small, large, within_s = self.rules.get((payment.country,)) or (0, float("inf"), 0)
            kind = "small" if payment.cents <= small else "large" if payment.cents >= large else "usual"
            yield payment.card, payment.at, kind, within_s


class Judge(StatefulProcessor):
    """Waits after a small payment of a card for a large one, until a timer says that it has been long enough."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.small = handle.getValueState("small", "at_ms long, until_ms long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[tuple[Any, ...]]:
        for payment in sorted(rows, key=lambda row: row.at):
            at_ms = round(payment.at.timestamp() * 1000)
            small_ms, until_ms = self.small.get() or (None, 0)
            if small_ms is not None and at_ms > until_ms:  # the watermark is behind: its timer has not fired yet
                yield self._end(key, "cleared", small_ms, until_ms, until_ms)
                small_ms = None
            if payment.kind == "small":
                if small_ms is not None:
                    self.handle.deleteTimer(until_ms)
                self.small.update((at_ms, at_ms + payment.within_s * 1000))
                self.handle.registerTimer(at_ms + payment.within_s * 1000)
            elif payment.kind == "large" and small_ms is not None:
                yield self._end(key, "alarm", small_ms, until_ms, at_ms)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[tuple[Any, ...]]:
        small_ms, until_ms = self.small.get() or (0, 0)
        yield self._end(key, "cleared", small_ms, until_ms, until_ms)

    def _end(self, key: Any, verdict: str, small_ms: int, until_ms: int, at_ms: int) -> tuple[Any, ...]:
        """Forget the small payment, and return the verdict on it."""
        self.handle.deleteTimer(until_ms)
        self.small.clear()
        return key[0], verdict, _moment(small_ms), _moment(at_ms)

    def close(self) -> None:
        pass


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def judge(spark: SparkSession, folder: Path, options: statelog.Options | None = None) -> DataFrame:
    """The verdicts on the payments of a folder, by its rules."""
    payments = read_batches(spark, folder / "payments", PAYMENT)
    rules = read_batches(spark, folder / "rules", RULE)
    judged = statelog.process(
        payments, ApplyRules(), "card string, at timestamp, kind string, within_s long", broadcast=rules, uid="rules"
    )
    return statelog.key_by(
        judged, "card", uid="cards", watermark=statelog.Watermark("at", DELAY_S * 1000), options=options
    ).transformWithState(Judge(), VERDICT, outputMode="append", timeMode="EventTime")


def example(spark: SparkSession, folder: Path) -> pd.DataFrame:
    """The verdicts on all payments."""
    write_batches(folder / "payments", make_payments())
    write_batches(folder / "rules", make_rules())
    return run(judge(spark, folder), folder).sort_values(["small_at", "card"], ignore_index=True)


def picture(verdicts: pd.DataFrame, axes: Axes) -> None:
    """The payments by time and amount; each verdict is a line from the small payment to its end."""
    euros = {
        (row["card"], row["at"].replace(tzinfo=None)): row["cents"] / 100 for rows in make_payments() for row in rows
    }
    axes.scatter([_minute(at) for _, at in euros], [*euros.values()], s=9, color="lightgrey", label="payment")
    for verdict, color in (("cleared", "C0"), ("alarm", "C3")):
        found = verdicts[verdicts.verdict == verdict].to_dict("records")
        for one in found:
            small = euros[one["card"], one["small_at"]]
            end = euros[one["card"], one["at"]] if verdict == "alarm" else small
            axes.plot(
                [_minute(one["small_at"]), _minute(one["at"])], [small, end], color=color, marker="o", markersize=4
            )
        axes.plot([], [], color=color, marker="o", markersize=4, label=f"{verdict}: {len(found)}")
    for batch, rules in enumerate(make_rules()):
        if rules:
            axes.axvline(batch * MINUTES_PER_BATCH, color="black", linewidth=0.6, linestyle=":")
            text = "rules: " + ", ".join(rule["country"] for rule in rules)
            axes.text(batch * MINUTES_PER_BATCH, 1.0, f" {text}", transform=axes.get_xaxis_transform(), fontsize=7)
    axes.set(xlabel="minutes", ylabel="euros", yscale="log")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _minute(time: datetime) -> float:
    return (time - after(0).replace(tzinfo=None)).total_seconds() / 60


if __name__ == "__main__":
    main(example, picture, __doc__)
