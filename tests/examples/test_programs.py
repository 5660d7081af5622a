"""Every example program: its whole result, computed once more without Spark and statelog, and its picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from PIL import Image
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

import statelog
from examples import blue_green, customer_history, deduplication, fraud_rules, program, sessions, top_products
from statelog import Step
from tests.spark.faults import KillAt

REPOSITORY = Path(__file__).parents[2]
PICTURES = REPOSITORY / "docs" / "pictures"
PROGRAMS = [blue_green, customer_history, deduplication, fraud_rules, sessions, top_products]
MOST_BYTES = 60_000

pytestmark = pytest.mark.spark
Results = Callable[[ModuleType], pd.DataFrame]


@pytest.fixture(name="result", scope="module")
def make_result(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The result of a program, which is run once."""
    results: dict[str, pd.DataFrame] = {}

    def result(module: ModuleType) -> pd.DataFrame:
        name = module.__name__.rpartition(".")[2]
        if name not in results:
            results[name] = module.example(spark, tmp_path_factory.mktemp(name))
        return results[name]

    return result


def naive(time: datetime) -> datetime:
    """A time as pandas frames of a query have it."""
    return time.replace(tzinfo=None)


def test_sessions(result: Results) -> None:
    gap, clicks = timedelta(minutes=sessions.GAP_MIN), [*chain.from_iterable(sessions.make_clicks())]
    end = max(click["at"] for click in clicks) - timedelta(minutes=sessions.DELAY_MIN)
    visits: list[list[Any]] = []
    for click in sorted(clicks, key=lambda click: (click["user"], click["at"])):
        if visits and visits[-1][0] == click["user"] and click["at"] <= visits[-1][2]:
            visits[-1][2:] = [click["at"] + gap, visits[-1][3] + 1]
        else:
            visits.append([click["user"], click["at"], click["at"] + gap, 1])
    expected = [(user, naive(first), naive(last), count) for user, first, last, count in visits if last <= end]
    assert 0 < len(expected) < len(visits), "some are still open"
    found = result(sessions)[["user", "window_start", "window_end", "clicks"]]
    assert sorted(found.itertuples(index=False, name=None)) == expected


def verdicts(batches: int = fraud_rules.BATCHES) -> list[tuple[str, str, datetime, datetime]]:
    """The verdicts on the payments of some batches, by rules that change with the batches."""
    rules: dict[str, Any] = {}
    open_: dict[str, tuple[datetime, datetime]] = {}
    found, newest = [], program.START
    for payments, changes in zip(
        fraud_rules.make_payments()[:batches], fraud_rules.make_rules()[:batches], strict=True
    ):
        rules |= {rule["country"]: rule for rule in changes}
        for payment in payments:
            card, at, rule = payment["card"], payment["at"], rules.get(payment["country"])
            newest = max(newest, at)
            if card in open_ and at > open_[card][1]:
                found.append((card, "cleared", *open_.pop(card)))
            if rule and payment["cents"] <= rule["small"]:
                open_[card] = (at, at + timedelta(seconds=rule["within_s"]))
            elif rule and payment["cents"] >= rule["large"] and card in open_:
                found.append((card, "alarm", open_.pop(card)[0], at))
    end = newest - timedelta(seconds=fraud_rules.DELAY_S)
    found += [(card, "cleared", at, until) for card, (at, until) in open_.items() if until <= end]
    return sorted((card, verdict, naive(at), naive(until)) for card, verdict, at, until in found)


def test_fraud_rules(result: Results) -> None:
    expected = verdicts()
    assert {verdict for _, verdict, _, _ in expected} == {"alarm", "cleared"}
    found = result(fraud_rules)[["card", "verdict", "small_at", "at"]]
    assert sorted(found.itertuples(index=False, name=None)) == expected


def test_fraud_rules_survive_a_kill(spark: SparkSession, tmp_path: Path) -> None:
    marker = tmp_path / "kill"
    marker.touch()
    batches = 3
    program.write_batches(tmp_path / "payments", fraud_rules.make_payments()[:batches])
    program.write_batches(tmp_path / "rules", fraud_rules.make_rules()[:batches])
    options = statelog.Options(observer=KillAt(Step.ACKING, 1, str(marker)))
    with pytest.raises(StreamingQueryException):
        program.run(fraud_rules.judge(spark, tmp_path, options), tmp_path)
    assert not marker.exists()
    found = program.run(fraud_rules.judge(spark, tmp_path), tmp_path)[["card", "verdict", "small_at", "at"]]
    assert sorted(found.itertuples(index=False, name=None)) == verdicts(batches)


def test_deduplication(result: Results) -> None:
    delay, newest = timedelta(minutes=deduplication.DELAY_MIN), program.START
    seen: dict[str, datetime] = {}
    expected = []
    for batch in deduplication.make_deliveries():
        watermark = newest - delay
        new = {event["id"]: event for event in batch if event["id"] not in seen}
        assert all(event["at"] > watermark for event in new.values()), "none is late"
        seen |= {name: event["at"] for name, event in new.items()}
        newest = max(newest, *seen.values())
        remembered = sum(at + delay > watermark for at in seen.values())
        expected.append((len(batch), len(new), sum(event["cents"] for event in new.values()), remembered))
    found = result(deduplication)[["delivered", "passed", "cents", "remembered"]]
    assert list(found.itertuples(index=False, name=None)) == expected


def test_top_products(result: Results) -> None:
    size, slide = timedelta(minutes=top_products.SIZE_MIN), timedelta(minutes=top_products.SLIDE_MIN)
    sales = [*chain.from_iterable(top_products.make_sales())]
    until = max(sale["at"] for sale in sales) - timedelta(minutes=top_products.DELAY_MIN)
    expected, end = [], program.START + slide
    while end <= until:
        sums: dict[str, int] = defaultdict(int)
        for sale in sales:
            if end - size <= sale["at"] < end:
                sums[sale["product"]] += sale["cents"]
        assert len(set(sums.values())) == len(sums), "of equal sums the first to come would count"
        best = sorted(sums.items(), key=lambda item: -item[1])[: top_products.TOP]
        expected += [(naive(end), rank, product, cents) for rank, (product, cents) in enumerate(best, 1)]
        end += slide
    found = result(top_products)[["window_end", "rank", "product", "cents"]]
    assert sorted(found.itertuples(index=False, name=None)) == expected


def test_customer_history(result: Results) -> None:
    changes = sorted(
        [*chain.from_iterable(customer_history.make_changes())], key=lambda row: (row["customer"], row["changed_on"])
    )
    expected = [
        (change["customer"], change["tier"], change["changed_on"], later["changed_on"] if is_same else None)
        for change, later in zip(changes, [*changes[1:], {"customer": None}], strict=True)
        for is_same in [change["customer"] == later["customer"]]
    ]
    found = result(customer_history)[["customer", "tier", "valid_from", "valid_to"]]
    assert list(found.itertuples(index=False, name=None)) == expected


def test_blue_green(result: Results) -> None:
    blue, red = dict[str, list[int]](), dict[str, list[int]]()
    expected = []
    for batch, bookings in enumerate(blue_green.make_bookings()):
        if batch == blue_green.BRANCHED:
            red = {account: list(balance) for account, balance in blue.items()}
        for booking in bookings:
            for balances, cents in ((blue, booking["cents"]), (red, max(booking["cents"], 0))):
                balance = balances.setdefault(booking["account"], [0, 0])
                balance[:] = balance[0] + cents, balance[1] + 1
        is_tried = blue_green.BRANCHED <= batch < blue_green.COMPARED
        for account in sorted({booking["account"] for booking in bookings}):
            if batch < blue_green.COMPARED:
                expected.append(("blue", batch, account, *blue[account]))
            if batch >= blue_green.BRANCHED:
                expected.append(("green", batch, account, *blue[account]))
            if is_tried:
                expected.append(("red", batch, account, *red[account]))
        if batch + 1 == blue_green.COMPARED:
            wrong = sum(red[account] != balance for account, balance in blue.items())
    found = result(blue_green)
    columns = ["version", "batch", "account", "cents", "bookings"]
    assert list(found[columns].itertuples(index=False, name=None)) == sorted(expected)
    assert dict(zip(found.version, found.different, strict=True)) == {"blue": 0, "green": 0, "red": wrong}
    assert wrong > 0


@pytest.mark.parametrize("module", PROGRAMS, ids=lambda module: module.__name__)
def test_the_picture_of_a_program_shows_its_result(module: ModuleType, result: Results, tmp_path: Path) -> None:
    name = module.__name__.rpartition(".")[2]
    drawn, kept = tmp_path / f"{name}.png", PICTURES / f"{name}.png"
    program.draw(module.picture, result(module), drawn)
    hint = f"./dev python -m examples.{name} --plot docs/pictures/{name}.png"
    assert kept.exists(), hint
    with Image.open(drawn) as new, Image.open(kept) as old:
        assert new.info["Result"] == old.info["Result"], hint
        assert new.size == old.size
        assert len(set(new.convert("RGB").getdata())) > 5, "it is not blank"
    assert kept.stat().st_size < MOST_BYTES


def test_every_program_has_a_test_and_a_place_in_the_gallery() -> None:
    names = {path.stem for path in (REPOSITORY / "examples").glob("*.py")} - {"processes", "program"}
    assert names == {module.__name__.rpartition(".")[2] for module in PROGRAMS}
    gallery = (REPOSITORY / "docs" / "examples.md").read_text()
    assert not [name for name in names if f"(pictures/{name}.png)" not in gallery]
