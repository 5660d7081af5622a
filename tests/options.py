"""Options from one mapping, for tests that draw or share them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

from statelog import Options, Tuning

_TUNING: Final = frozenset(field.name for field in fields(Tuning))


def make_options(**given: Any) -> Options:
    """The options of these values; those of :class:`Tuning` go there."""
    return changed_options(Options(), **given)


def changed_options(options: Options, **given: Any) -> Options:
    """The same options with other values; those of :class:`Tuning` go there."""
    tuning = {name: value for name, value in given.items() if name in _TUNING}
    others = {name: value for name, value in given.items() if name not in _TUNING}
    return replace(options, **others, tuning=replace(options.tuning, **tuning))
