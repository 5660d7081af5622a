"""Collects tests once, and runs some of them for every mutant, each time in a fork of this process.

A mutant differs from the code in one function: the fork gives that function the mutant's code object, and so nothing is
imported or collected again. One JSON object per line comes in: a file for the coverage of all tests; or the source of a
mutant, and the tests with seconds for each. One word goes out: passed, failed, hung, or elsewhere if the mutation is in
no function.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TextIO

import pytest

_MEMORY_BYTES = 4 << 30
_COVERAGE_S = 600.0
_STATUS = {0: "passed", 1: "failed", 2: "elsewhere"}
_Place = tuple[str, int]


class _Settings:
    """Hypothesis tries the same examples every time, keeps none, and does not make failing ones small."""

    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings

        parent = settings.get_profile(settings.get_current_profile_name())
        settings.register_profile(
            "mutation", parent, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
        )
        settings.load_profile("mutation")


class _Loop:
    """Instead of running the collected tests, waits for what to run."""

    def __init__(self, file: Path, requests: TextIO, answers: TextIO) -> None:
        self._file, self._requests, self._answers = file, requests, answers
        self._source = file.read_text()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._functions = _functions_of(self._file)
        if session.testsfailed:
            self._answer("failed")
            return True
        self._answer("passed")
        gc.freeze()
        for line in self._requests:
            request = json.loads(line)
            child = os.fork()
            if child == 0:
                self._child(session, request)
            _, status = os.waitpid(child, 0)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what outlives it
            code = os.waitstatus_to_exitcode(status)
            self._answer("hung" if code in (-signal.SIGALRM, -signal.SIGPROF) else _STATUS.get(code, "failed"))
        return True

    def _answer(self, text: str) -> None:
        self._answers.write(text + "\n")
        self._answers.flush()

    def _child(self, session: pytest.Session, request: dict[str, Any]) -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
        status = 1
        try:
            is_elsewhere = "mutant" in request and not self._swap(request["mutant"])
            status = 2 if is_elsewhere else self._run(session, request)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)

    def _run(self, session: pytest.Session, request: dict[str, Any]) -> int:
        recorder = _Recorder(self._file) if "coverage" in request else None
        limits = dict.fromkeys(self._items, _COVERAGE_S) if recorder else request["seconds"]
        items = [self._items[name] for name in limits]
        for item, following in zip(items, [*items[1:], None], strict=True):
            if recorder is not None:
                recorder.begin(item.nodeid)
            # Of the processor, whatever else the machine does; and in all, for a test that waits for ever.
            signal.setitimer(signal.ITIMER_PROF, limits[item.nodeid])
            signal.setitimer(signal.ITIMER_REAL, 30 + 4 * limits[item.nodeid])
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.testsfailed:
                return 1
        if recorder is not None:
            recorder.write(request["coverage"])
        return 0

    def _swap(self, mutant: str) -> bool:
        """Give the functions that differ the mutant's code; False if something else differs."""
        before, after = (compile(source, str(self._file), "exec") for source in (self._source, mutant))
        changed = list(_changed(before, after))
        for place, code in changed:
            function = None if place is None else self._functions.get(place)
            if function is None:
                return False
            function.__code__ = code
        return bool(changed)


class _Recorder:
    """Notes, for every test, its seconds of processor time and the lines of the mutated file that it runs."""

    def __init__(self, file: Path) -> None:
        from coverage import Coverage

        self._file = str(file)
        self._coverage = Coverage(data_file=None, include=[self._file], config_file=False)
        self._seconds: dict[str, float] = {}
        self._test, self._since = "", 0.0
        self._coverage.start()

    def begin(self, test: str) -> None:
        """The next test begins."""
        now = time.process_time()
        self._seconds[self._test] = now - self._since
        self._test, self._since = test, now
        self._coverage.switch_context(test)

    def write(self, file: str) -> None:
        """All tests are done."""
        self.begin("")
        self._coverage.stop()
        lines = self._coverage.get_data().contexts_by_lineno(self._file)
        del self._seconds[""]
        Path(file).write_text(json.dumps({"seconds": self._seconds, "lines": lines}))


def _functions_of(file: Path) -> dict[_Place, FunctionType]:
    """The functions that a file has made, also those that a decorator has hidden."""
    return {
        (found.__code__.co_qualname, found.__code__.co_firstlineno): found
        for found in gc.get_objects()
        if type(found) is FunctionType and found.__code__.co_filename == str(file)
    }


def _changed(before: CodeType, after: CodeType) -> Iterator[tuple[_Place | None, CodeType]]:
    """The functions of a module or class body that differ, by where they were; None if the body itself does."""
    ours = [one for one in before.co_consts if isinstance(one, CodeType)]
    theirs = [one for one in after.co_consts if isinstance(one, CodeType)]
    if _bare(before) != _bare(after) or len(ours) != len(theirs):
        yield None, after
        return
    for one, other in zip(ours, theirs, strict=True):
        if _same(one, other):
            continue
        if one.co_flags & 0x1:  # CO_OPTIMIZED: a function, not the body of a class
            yield (one.co_qualname, one.co_firstlineno), other
        else:
            yield from _changed(one, other)


def _bare(code: CodeType) -> tuple[object, ...]:
    """What a body does, but for what its functions do and for the numbers of lines."""
    constants = [None if isinstance(one, CodeType) else (type(one), one) for one in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, constants, names, code.co_exceptiontable


def _same(one: CodeType, other: CodeType) -> bool:
    if _bare(one) != _bare(other):
        return False
    pairs = zip(one.co_consts, other.co_consts, strict=True)
    return all(_same(a, b) for a, b in pairs if isinstance(a, CodeType) and isinstance(b, CodeType))


def main() -> None:
    """Serve for one file; the arguments are its path, two file descriptors and the files with its tests."""
    file, requests, answers, *tests = sys.argv[1:]
    loop = _Loop(Path(file), os.fdopen(int(requests)), os.fdopen(int(answers), "w"))
    pytest.main(["-q", "-s", "-o", "timeout=0", "-p", "no:cacheprovider", *tests], [_Settings(), loop])


if __name__ == "__main__":
    main()
