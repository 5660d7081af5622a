"""The page of the options is what the options say."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from statelog import Options, Tuning

_path = Path(__file__).parents[2] / "docs" / "options_table.py"
_spec = importlib.util.spec_from_file_location("options_table", _path)
assert _spec is not None
assert _spec.loader is not None
options_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(options_table)


def test_the_page_is_made_from_the_options() -> None:
    assert options_table.PAGE.read_text() == options_table.page(), "run ./dev python docs/options_table.py"


@pytest.mark.parametrize("kind", [Options, Tuning])
def test_every_option_is_described(kind: type[Options | Tuning]) -> None:
    assert list(options_table.meanings(kind)) == [field.name for field in dataclasses.fields(kind)]
