"""Moves Python's wall clock, for processes whose PYTHONPATH begins with this folder; no other program's clock moves."""

from __future__ import annotations

import os
import time

_real_time, _real_time_ns = time.time, time.time_ns
_ahead_s = int(os.environ.get("TESTS_CLOCK_AHEAD_S", "0"))


def _time() -> float:
    return _real_time() + _ahead_s


def _time_ns() -> int:
    return _real_time_ns() + _ahead_s * 10**9


time.time, time.time_ns = _time, _time_ns
