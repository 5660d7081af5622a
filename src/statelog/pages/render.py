"""Makes HTML of the page."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from statelog.log.entry import Claim
from statelog.pages.browse import Found, Wanted
from statelog.pages.charts import Chart, Timeline
from statelog.pages.model import PageModel
from statelog.pages.operator_charts import operator_charts, operator_timelines, ratio_text, seconds_text, subtask_charts
from statelog.pages.operator_model import CheckpointRow, OperatorModel
from statelog.reading.pinning import PinInfo
from statelog.texts import size_text, time_text

_GROUP: Final = 50
_GROUPS: Final = 10
_SHOWN: Final = 10
"""Rows of the smaller tables."""
_UNKNOWN: Final = "\N{EN DASH}"


@dataclass(frozen=True)
class OperatorView:
    """An operator with its drawings, and the rows that are shown, the newest first."""

    model: OperatorModel
    anchor: str
    skew: str
    timelines: Sequence[Timeline]
    charts: Sequence[Chart]
    subtask_charts: Sequence[Chart]
    materializations: Sequence[CheckpointRow]
    pins: Sequence[PinInfo]
    starts: Sequence[Claim]
    groups: Sequence[Sequence[CheckpointRow]]
    left_out: int
    """Older checkpoints that are in no group."""


def view_of(one: OperatorModel, place: int) -> OperatorView:
    """What is shown of an operator."""
    newest_first = one.checkpoints[::-1]
    shown = newest_first[: _GROUP * _GROUPS]
    return OperatorView(
        model=one,
        anchor=f"operator-{place}",
        skew=_skew(one),
        timelines=operator_timelines(one),
        charts=operator_charts(one),
        subtask_charts=subtask_charts(one),
        materializations=[row for row in newest_first if row.materialized][:_SHOWN],
        pins=one.pins[::-1][:_SHOWN],
        starts=one.starts[::-1][:_SHOWN],
        groups=[shown[start : start + _GROUP] for start in range(0, len(shown), _GROUP)],
        left_out=len(newest_first) - len(shown),
    )


def render(page: PageModel, *, is_live: bool = False) -> str:
    """The page as one HTML document, which needs no other file; a live one loads itself again."""
    views = [view_of(one, place) for place, one in enumerate(page.operators)]
    return _filled("page.html", page=page, views=views, title=page.location, is_live=is_live)


def browse_html(page: PageModel, wanted: Wanted, found: Found | None) -> str:
    """The state browser with the rows that were found."""
    return _filled("state.html", page=page, wanted=wanted, found=found, title=page.location, is_live=False)


def error_html(text: str) -> str:
    """A page with a message."""
    return _filled("error.html", text=text, title="statelog", is_live=False)


def _filled(template: str, **values: Any) -> str:
    values |= {"style": Markup(_style()), "policy": content_policy()}
    return _environment().get_template(template).render(values)


def content_policy() -> str:
    """The Content-Security-Policy of the page: its own style, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'self'"


def _skew(one: OperatorModel) -> str:
    sizes = [subtask.state_bytes for subtask in one.subtasks]
    middle = median(sizes) if sizes else 0
    return f"the largest {ratio_text(max(sizes) / middle)} the median" if middle else ""


@cache
def _style() -> str:
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, "style.css")[0]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("statelog.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": lambda value: _UNKNOWN if value is None else size_text(value),
        "time": lambda value: _UNKNOWN if value is None else time_text(value),
        "number": lambda value: _UNKNOWN if value is None else f"{value:,}",
        "ratio": lambda value: _UNKNOWN if value is None else ratio_text(value),
        "seconds": seconds_text,
    }
    return environment
