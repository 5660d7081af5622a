"""The tables of options and metrics are what the code says."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from statelog import Options, Tuning

_path = Path(__file__).parents[2] / "docs" / "tables.py"
_spec = importlib.util.spec_from_file_location("tables", _path)
assert _spec is not None
assert _spec.loader is not None
tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tables)


def test_the_pages_are_made_from_the_code() -> None:
    assert tables.PAGE.read_text() == tables.page(), "run ./dev python docs/tables.py"
    assert tables.METRICS_PAGE.read_text() == tables.metrics_page(), "run ./dev python docs/tables.py"


@pytest.mark.parametrize("kind", [Options, Tuning])
def test_every_option_is_described(kind: type[Options | Tuning]) -> None:
    assert list(tables.meanings(kind)) == [field.name for field in dataclasses.fields(kind)]
