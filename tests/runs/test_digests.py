"""A digest names a state: whose it is, and every change that led to it, in order."""

from __future__ import annotations

from statelog.runs import digests


def test_states_differ_that_differ_in_anything() -> None:
    genesis_digests = [
        digests.genesis(*names) for names in (("op-1", 0, 2), ("op-2", 0, 2), ("op-1", 1, 2), ("op-1", 0, 3))
    ]
    after = [
        digests.extend(genesis_digests[0], batch, parts)
        for batch in (-1, 0, 1, 255)
        for parts in ([], [b"a"], [b"b"], [b"a", b"b"], [b"b", b"a"])
    ]
    later = [digests.extend(digest, 2, [b"a"]) for digest in (*genesis_digests, *after)]
    assert len({*genesis_digests, *after, *later}) == len(genesis_digests) + len(after) + len(later)
    assert {len(digest) for digest in (*genesis_digests, *after)} == {16}


def test_the_same_changes_lead_to_the_same_state() -> None:
    first, second = (digests.extend(digests.genesis("op-1", 0, 2), -1, [b"a"]) for _ in range(2))
    assert first == second
    assert digests.checksum(b"data") == digests.checksum(memoryview(b"data")) != digests.checksum(b"date")


def test_a_checksum_may_be_of_parts() -> None:
    parts = digests.Checksum()
    assert parts.value == digests.checksum(b"")
    for part in (b"d", b"", b"ata"):
        parts.add(part)
    assert parts.value == digests.checksum(b"data")
