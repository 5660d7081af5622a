"""The lists of mutation testing name files, tests and lines that exist."""

from __future__ import annotations

from pathlib import Path

from tests.mutation.lists import LIST, explained, files_with_tests, function_at

_REPOSITORY = Path(__file__).parents[2]


def test_every_mutated_file_has_tests_that_exist() -> None:
    table = files_with_tests(_REPOSITORY)
    assert "src/statelog/coordinator/coordinator.py" in table
    assert [file for file, tests in table.items() if not tests] == []
    named = {*table, *(test for tests in table.values() for test in tests)}
    assert [file for file in sorted(named) if not (_REPOSITORY / file).is_file()] == []


def test_every_explained_line_is_in_its_file_and_has_a_reason() -> None:
    for mutant, why in explained().items():
        source = (_REPOSITORY / mutant.file).read_text()
        assert mutant.before in " ".join(source.split()), f"{LIST.name}: no such line in {mutant.file}: {mutant.before}"
        assert len(why.split()) > 3, f"{LIST.name}: no reason for {mutant.after}"


def test_a_function_is_found_by_a_line() -> None:
    source = "x = 1\nclass A:\n    y = 2\n    def f(self):\n        return 3\n"
    assert [function_at(source, line) for line in range(1, 6)] == ["", "A", "A", "A.f", "A.f"]
