"""Where the time of a thread goes, by module."""

from __future__ import annotations

import pstats
import sys
from collections import defaultdict
from cProfile import Profile
from typing import Final

_BUILT_IN: Final = "~"
"""What a profile has in place of the file of functions in C."""


def seconds_by_module(profile: Profile) -> dict[str, float]:
    """The seconds that a profile has of each module's own code; a function in C counts for those that call it."""
    names = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    found: defaultdict[str, float] = defaultdict(float)
    functions = pstats.Stats(profile).stats  # type: ignore[attr-defined]  # missing from the type stubs
    for (file, _, _), (_, _, own_s, _, callers) in functions.items():
        if file != _BUILT_IN:
            found[names.get(file, file)] += own_s
            continue
        for (caller, _, _), (_, _, caller_s, _) in callers.items():
            found["built in" if caller == _BUILT_IN else names.get(caller, caller)] += caller_s
    return dict(found)
