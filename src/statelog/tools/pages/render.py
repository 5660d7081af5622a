"""Renders the page as HTML."""

from __future__ import annotations

import base64
import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from statelog.log.entry import Claim
from statelog.reading.pins import PinInfo
from statelog.shown import REDACTED, plain_text, size_text, time_text
from statelog.tools.pages.browse import Found, Wanted
from statelog.tools.pages.charts import Chart, Timeline
from statelog.tools.pages.model import PageModel
from statelog.tools.pages.operator_charts import (
    operator_charts,
    operator_timelines,
    ratio_text,
    restore_chart,
    seconds_text,
    subtask_charts,
)
from statelog.tools.pages.operator_model import CheckpointRow, OperatorModel

_GROUP: Final = 50
_GROUPS: Final = 10
_PAGE: Final = 200
"""Checkpoints on a page of the history."""
_REFRESH_S: Final = 15
_REFRESH_UNDERWAY_S: Final = 3
"""While an operator begins or restores."""
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
    restore_chart: Chart | None
    materializations: Sequence[CheckpointRow]
    pins: Sequence[PinInfo]
    starts: Sequence[Claim]
    groups: Sequence[Sequence[CheckpointRow]]
    left_out: int
    """Older checkpoints that are in no group."""


def view_of(one: OperatorModel, place: int, *, is_live: bool) -> OperatorView:
    """What is shown of an operator."""
    newest_first = one.checkpoints[::-1]
    shown = newest_first[: _GROUP if is_live else _GROUP * _GROUPS]
    return OperatorView(
        model=one,
        anchor=f"operator-{place}",
        skew=_skew(one),
        timelines=operator_timelines(one),
        charts=operator_charts(one),
        subtask_charts=subtask_charts(one),
        restore_chart=restore_chart(one),
        materializations=[row for row in newest_first if row.materialized][:_SHOWN],
        pins=one.pins[::-1][:_SHOWN],
        starts=one.starts[::-1][:_SHOWN],
        groups=[shown[start : start + _GROUP] for start in range(0, len(shown), _GROUP)],
        left_out=len(newest_first) - len(shown),
    )


def render(page: PageModel, *, is_live: bool = False, redacts: bool = False) -> str:
    """The page as one HTML document, which needs no other file; a live one loads itself again.

    If it redacts, dots stand for keys.
    """
    views = [view_of(one, place, is_live=is_live) for place, one in enumerate(page.operators)]
    refresh_s = (_REFRESH_UNDERWAY_S if page.is_underway else _REFRESH_S) if is_live else None
    return _filled("page.html", page=page, views=views, title=page.location, refresh_s=refresh_s, redacts=redacts)


def checkpoints_html(page: PageModel, uid: str, newest: str) -> str:
    """A page of an operator's history; its first row is the checkpoint of batch `newest`, or the one before it."""
    one = next((one for one in page.operators if one.uid == uid), None)
    if one is None:
        return error_html(f"There is no checkpoint of an operator '{uid}'.")
    if newest and not newest.isdecimal():
        return error_html(f"'{newest}' is not a batch.")
    batches = [row.batch for row in one.checkpoints]
    end = bisect_right(batches, int(newest)) if newest else len(batches)
    end = max(end, 1)
    rows = one.checkpoints[max(end - _PAGE, 0) : end][::-1]
    newer = batches[min(end + _PAGE, len(batches)) - 1] if end < len(batches) else None
    older = batches[end - _PAGE - 1] if end > _PAGE else None
    oldest = batches[min(_PAGE, len(batches)) - 1] if older is not None else None
    return _filled(
        "checkpoints.html", page=page, one=one, rows=rows, newer=newer, older=older, oldest=oldest, title=page.location
    )


def browse_html(page: PageModel, wanted: Wanted, found: Found | None, *, redacts: bool) -> str:
    """The state browser with the rows that were found; if it redacts, without the key that was typed."""
    return _filled("state.html", page=page, wanted=wanted, found=found, redacts=redacts, title=page.location)


def error_html(text: str) -> str:
    """A page with a message."""
    return _filled("error.html", text=text, title="statelog")


def _filled(template: str, **values: Any) -> str:
    given = {"refresh_s": None, "style": Markup(_style()), "policy": content_policy()} | values
    return _environment().get_template(template).render(given)


def content_policy() -> str:
    """The Content-Security-Policy of the page: its own style, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'self'"


def _skew(one: OperatorModel) -> str:
    sizes = [subtask.state_bytes for subtask in one.subtasks]
    middle = median(sizes) if len(sizes) > 1 else 0
    return f"the largest {ratio_text(max(sizes) / middle)} the median" if middle else ""


def _plain(value: Any) -> Any:
    """A value about to be filled in; a text without control characters but ends of lines."""
    return plain_text(value, "\n\t") if type(value) is str else value


@cache
def _style() -> str:
    environment = _environment()
    assert environment.loader is not None
    return environment.loader.get_source(environment, "style.css")[0]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("statelog.tools.pages"),
        autoescape=True,
        finalize=_plain,
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
        "key": lambda key, redacts: REDACTED if redacts or key is None else ", ".join(map(str, key)),
        "count": lambda value, noun: f"{value:,} {noun}{'' if value == 1 else 's'}",
    }
    return environment
