"""Runs tests in forks of a process that has imported the packages from outside, but nothing of this project.

One JSON object per line comes in: the arguments for pytest, seconds, and a file for coverage if lines are to be
recorded. One goes out: the exit status of pytest, or null if the time was over.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

_PRELOADED = (
    "hypothesis.stateful", "hypothesis.strategies", "msgspec", "numpy", "obstore.store", "pandas", "pyarrow.compute",
    "pyarrow.dataset", "pyspark.sql.functions", "pyspark.sql.streaming", "pytest_timeout", "rocksdict", "xxhash",
)  # fmt: skip
_MEMORY_BYTES = 4 << 30


class _Settings:
    """Hypothesis tries the same examples every time, keeps none, and does not make failing ones small."""

    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings

        parent = settings.get_profile(settings.get_current_profile_name())
        settings.register_profile(
            "mutation", parent, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
        )
        settings.load_profile("mutation")


class _Recorder:
    """Notes, for every test, its seconds and the lines of the mutated files that it runs."""

    def __init__(self, file: str, sources: list[str]) -> None:
        from coverage import Coverage

        self._file, self._sources = file, [str(Path(source).resolve()) for source in sources]
        self._coverage = Coverage(data_file=None, include=self._sources, config_file=False)
        self._seconds: dict[str, float] = {}
        self._coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._coverage.switch_context(item.nodeid)
        start = time.perf_counter()
        yield
        self._seconds[item.nodeid] = time.perf_counter() - start
        self._coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        lines = {}
        for source in self._sources:
            by_line = data.contexts_by_lineno(source)
            lines[source] = {line: [c for c in contexts if c] for line, contexts in by_line.items()}
        Path(self._file).write_text(json.dumps({"seconds": self._seconds, "lines": lines}))


def _child(request: dict[str, Any]) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    plugins: list[Any] = [_Settings()]
    if request.get("coverage"):
        plugins.append(_Recorder(request["coverage"], request["sources"]))
    status = 3
    try:
        status = int(pytest.main([*request["arguments"], "-p", "no:cacheprovider"], plugins))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait(child: int, seconds: float) -> int | None:
    """The exit status of the child, which is ended with all that it started when the time is over."""
    descriptor = os.pidfd_open(child)
    try:
        in_time = bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)
    try:
        os.killpg(child, signal.SIGKILL)  # also what outlives a child that is done
    except ProcessLookupError:
        if not in_time:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None


def main() -> None:
    """Serve until the input ends."""
    for module in _PRELOADED:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(request)
        answers.write(json.dumps(_wait(child, request["seconds"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
