"""What an attempt tells the coordinator if it cannot keep local files."""

from __future__ import annotations

from pathlib import Path

import pytest

from statelog import CorruptionError, ErrorKind, FencedError, ProtocolError, StorageError
from statelog.rpc.messages import Acked, CheckOwner, DiskFailed, Reply, Request
from statelog.tasks.attempt import Attempt
from tests.attempts import make_attempt


class Driver:
    """Answers, but for one kind of request."""

    def __init__(self, fails: type[Request] | None = None, error: Exception | None = None) -> None:
        self.requests: list[Request] = []
        self._fails = fails
        self._error = error

    def __call__(self, request: Request, payload: bytes) -> Reply:
        self.requests.append(request)
        if self._error is not None and self._fails is not None and isinstance(request, self._fails):
            raise self._error
        return Acked()


def attempt_of(tmp_path: Path, driver: Driver) -> Attempt:
    return make_attempt(tmp_path / "0", call=driver, stage=4)


def test_a_failed_disk_is_told(tmp_path: Path) -> None:
    driver = Driver()
    attempt = attempt_of(tmp_path, driver)
    with pytest.raises(StorageError) as caught, attempt.local_in_use(tmp_path / "0"):
        raise OSError("no room")
    assert caught.value.kind is ErrorKind.LOCAL_DISK
    assert driver.requests == [CheckOwner(attempt.task), DiskFailed(attempt.task, 4)]


def test_the_error_is_the_disks_even_if_the_driver_does_not_answer(tmp_path: Path) -> None:
    driver = Driver(DiskFailed, ProtocolError("no answer"))
    with pytest.raises(StorageError) as caught, attempt_of(tmp_path, driver).local_in_use(tmp_path / "0"):
        raise OSError("no room")
    assert caught.value.kind is ErrorKind.LOCAL_DISK
    assert "no answer" not in str(caught.value)


def test_the_disk_of_a_fenced_start_has_not_failed(tmp_path: Path) -> None:
    driver = Driver(CheckOwner, FencedError("a newer start owns the location"))
    attempt = attempt_of(tmp_path, driver)
    with pytest.raises(FencedError), attempt.local_in_use(tmp_path / "0"):
        raise OSError("no such file")
    assert driver.requests == [CheckOwner(attempt.task)]


def test_damage_is_not_the_disks(tmp_path: Path) -> None:
    driver = Driver()
    attempt = attempt_of(tmp_path, driver)
    with pytest.raises(CorruptionError), attempt.local_in_use(tmp_path / "0"):
        raise CorruptionError("an object is damaged")
    assert driver.requests == [CheckOwner(attempt.task)]
