"""A log of read files is cut off where a batch had come to, compacted or not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelog import CorruptionError, StateMissingError
from statelog.spark.checkpoint.logs import file_log_until


def line(number: int, file: int = 0) -> str:
    return json.dumps({"path": f"file:///data/{number}-{file}.json", "timestamp": number, "batchId": number})


def text(*lines: str) -> bytes:
    return "\n".join(["v1", *lines]).encode()


def spark_log(count: int, interval: int) -> dict[str, bytes]:
    """All files that Spark has ever written of a log."""
    files: dict[str, bytes] = {}
    for number in range(count):
        if (number + 1) % interval == 0:
            files[f"{number}.compact"] = text(*(line(one) for one in range(number + 1)))
        else:
            files[str(number)] = text(line(number))
    return files


def read_as_spark(files: dict[str, bytes], default_interval: int) -> list[str]:
    """What CompactibleFileStreamLog.allFiles reads: the last compacted entry and those after it, which must all be."""
    compact = sorted(int(name.removesuffix(".compact")) for name in files if name.endswith(".compact"))
    interval = default_interval
    if len(compact) == 1:
        count = compact[0] + 1
        if count <= default_interval:
            interval = count
        elif default_interval < count / 2:
            interval = next(one for one in [*range(default_interval, count // 2 + 1), count] if count % one == 0)
        else:
            interval = count
    elif compact:
        interval = compact[-1] - compact[-2]
    newest = max(int(name.removesuffix(".compact")) for name in files)
    last = (newest + 1) // interval * interval - 1
    names = [f"{last}.compact"] if last >= 0 else []
    names += [str(number) for number in range(last + 1, newest + 1)]
    return [one for name in names for one in files[name].decode().split("\n")[1:] if one]


@given(st.data())
def test_spark_reads_what_was_read_up_to_the_entry(data: st.DataObject) -> None:
    interval = data.draw(st.sampled_from([2, 3, 10]))
    count = data.draw(st.integers(1, 45))
    files = spark_log(count, interval)
    compact = [int(name.removesuffix(".compact")) for name in files if name.endswith(".compact")]
    # Spark deletes what is before a compacted entry some time later.
    forgotten = data.draw(st.sampled_from([-1, *compact]))
    files = {name: held for name, held in files.items() if int(name.removesuffix(".compact")) >= forgotten}
    end = data.draw(st.integers(0, count - 1))
    cut = file_log_until(list(files), end, files.__getitem__, "sources/0")
    assert read_as_spark(cut, interval) == [line(number) for number in range(end + 1)]
    assert max(int(name.removesuffix(".compact")) for name in cut) == end


def test_entries_that_are_there_are_copied_as_they_are() -> None:
    files = spark_log(25, 10)
    assert file_log_until(list(files), 22, files.__getitem__, "sources/0") == {
        name: held for name, held in files.items() if int(name.removesuffix(".compact")) <= 22
    }


def test_several_files_of_an_entry_stay_in_order() -> None:
    files = {"9.compact": text(line(0, 2), line(0, 1), *(line(number) for number in range(1, 10)))}
    assert file_log_until(list(files), 0, files.__getitem__, "sources/0") == {"0.compact": text(line(0, 2), line(0, 1))}


def test_entries_that_are_gone_are_named() -> None:
    with pytest.raises(StateMissingError, match="sources/0: .*lacks entries up to 3"):
        file_log_until(["1", "2", "3"], 3, lambda name: b"v1", "sources/0")


NO_LOGS = [b"v1\n{", b"v1\n[]", b"v1\n{}", b"v1\n1", b'v1\n{"batchId":"x"}', b"v1\n\xff", b"v1\n" + b"[" * 9999]


@pytest.mark.parametrize("content", NO_LOGS)
def test_a_compacted_log_that_is_none_is_damage(content: bytes) -> None:
    with pytest.raises(CorruptionError, match=r"sources/0/9\.compact: it is not a log"):
        file_log_until(["9.compact"], 5, lambda name: content, "sources/0")
