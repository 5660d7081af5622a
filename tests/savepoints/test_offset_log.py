"""What is read of Spark's offset log, in both of its formats."""

from __future__ import annotations

import json

import pytest

from statelog import ConfigurationError, ErrorKind
from statelog.savepoints.spark_logs import BatchOffsets

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
    assert read(FIRST).file_log_ends == {"0": 4}
    assert read(SECOND).file_log_ends == {"10": 5, "orders": 4}


def test_the_watermark_and_the_settings_of_the_query() -> None:
    found = read('v1\n{"batchWatermarkMs":17,"conf":{"a:b":"c"}}')
    assert (found.watermark_ms, found.conf) == (17, {"a:b": "c"})
    assert (read("v1").watermark_ms, read("v1").conf) == (0, {})


def test_a_clock_is_added_behind_the_other_sources() -> None:
    numbered = SECOND.replace("orders:", "0:")
    for text, added in ((FIRST, ""), (numbered, "5:")):
        assert read(text).text == text
        assert read(text).plus_clock().text == f'{text}\n{added}{{"clock": "", "tick": 0}}'


def test_no_clock_is_added_to_sources_with_names() -> None:
    with pytest.raises(ConfigurationError, match="sources have names") as refused:
        read(SECOND).plus_clock()
    assert refused.value.kind is ErrorKind.UNSUPPORTED_FEATURE


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
