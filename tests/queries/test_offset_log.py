"""What is read of Spark's offset log, in both of its formats."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelog import ConfigurationError, ErrorKind
from statelog.spark.checkpoint.logs import BatchOffsets

METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1795357552879,"conf":{"a:b":"c"}}'
CLOCK = '{"clock": "0123456789abcdef", "tick": 7}'
FIRST = f'v1\n{METADATA}\n{{"logOffset":4}}\n-\n{CLOCK}\n{{"topic":{{"0":17}}}}'
SECOND = f'v2\n{METADATA}\n10:{{"logOffset":5}}\norders:{{"logOffset":4}}\n2:{CLOCK}\n3:{{"topic":{{"0":17}}}}\n1:-'


def read(text: str) -> BatchOffsets:
    return BatchOffsets.parse(text, "offsets/3")


def test_the_time_of_the_batch() -> None:
    assert read(FIRST).time_ms == read(SECOND).time_ms == 1795357552879
    assert read("v1\n{}").time_ms is read("v1\n").time_ms is read("v1").time_ms is None


def test_where_logs_of_files_end() -> None:
    assert read(FIRST).file_log_ends({"0": ["4"], "3": ["0"]}) == {"0": 4}
    assert read(SECOND).file_log_ends({"10": ["5"], "orders": ["4.compact"]}) == {"10": 5, "orders": 4}


@given(st.data())
def test_where_logs_of_files_end_if_sources_are_read_several_times(data: st.DataObject) -> None:
    """Spark numbers folders by sources, and writes a line for each place that reads one."""
    plan: list[int] = []
    for _ in range(data.draw(st.integers(1, 6), "places")):
        plan.append(data.draw(st.integers(0, max(plan, default=-1) + 1), "source"))
    sources = range(max(plan) + 1)
    are_files = [data.draw(st.booleans(), f"source {source} reads files") for source in sources]
    reached = [data.draw(st.integers(0, 2), f"offset of source {source}") for source in sources]
    lines = [json.dumps({"logOffset" if are_files[one] else "topic": reached[one]}) for one in plan]
    logs = {str(one): [str(number) for number in range(reached[one] + 1)] for one in sources if are_files[one]}
    expected = {str(one): reached[one] for one in sources if are_files[one]}
    assert read("\n".join(["v1", METADATA, *lines])).file_log_ends(logs) == expected


def test_the_watermark_and_the_settings_of_the_query() -> None:
    found = read('v1\n{"batchWatermarkMs":17,"conf":{"a:b":"c"}}')
    assert (found.watermark_ms, found.conf) == (17, {"a:b": "c"})
    assert (read("v1").watermark_ms, read("v1").conf) == (0, {})


@pytest.mark.parametrize("text", [FIRST, SECOND])
def test_an_entry_is_written_as_it_was_read(text: str) -> None:
    assert read(text).text == text


@pytest.mark.parametrize("text", [FIRST, SECOND])
def test_only_the_clock_is_given_another_id(text: str) -> None:
    before, after = text.split("\n"), read(text).with_clock("new").split("\n")
    assert len(before) == len(after)
    changed = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    [(old, new)] = changed
    assert new.removesuffix(json.dumps({"clock": "new", "tick": 7})) == old.removesuffix(CLOCK)


@pytest.mark.parametrize("text", ["v3\n{}\n0:{}", "", "v2\n{}\n{}"])
def test_another_format_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"offsets/3: .*format of Spark's offset log") as refused:
        read(text)
    assert refused.value.kind is ErrorKind.UNSUPPORTED_FEATURE


NEW = json.dumps({"clock": "new", "tick": 0})
A, B, OLD = '{"logOffset":4}', '{"topic":{"0":17}}', '{"clock": "old", "tick": 7}'


@pytest.mark.parametrize(
    ("lines", "are_clocks", "expected"),
    [
        ([A], [False, True], [A, NEW]),
        ([A, B], [False, False, True, True], [A, B, NEW, NEW]),
        ([A, OLD], [False, True, True], [A, OLD, NEW]),
        ([A, OLD], [False], [A]),
        ([A, OLD, OLD], [False, True], [A, OLD]),
        ([A, OLD], [False, True], None),
        ([A], [False], None),
        ([A], [True, False], None),
        ([OLD, A], [False], None),
        ([A, OLD, B], [False, False], None),
        ([A, B], [False, True], None),
        ([A], [False, False], None),
        ([A], [False, False, True], None),
    ],
)
def test_clocks_come_and_go_behind_all_other_sources(
    lines: list[str], are_clocks: list[bool], expected: list[str] | None
) -> None:
    entry = read("\n".join(["v1", METADATA, *lines]))
    wanted = None if expected is None else "\n".join(["v1", METADATA, *expected])
    assert entry.with_clocks(are_clocks, "new") == wanted


def test_clocks_come_and_go_by_their_numbers() -> None:
    """In version 2 the lines may stand in any order."""
    plain, clocked = f"v2\n{METADATA}\n1:{B}\n0:{A}", f"v2\n{METADATA}\n2:{OLD}\n1:{B}\n0:{A}"
    assert read(plain).with_clocks([False, False, True], "new") == f"{plain}\n2:{NEW}"
    assert read(clocked).with_clocks([False, False], "new") == plain
    assert read(clocked).clocks == ["old"]
