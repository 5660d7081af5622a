"""The doctor's judgement of settings, versions and local disks."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

import statelog
from statelog.tools.doctor.executor_work import check_disk
from statelog.tools.doctor.finding import Place
from statelog.tools.doctor.settings import setting_findings
from statelog.tools.doctor.versions import (
    PACKAGES,
    Installed,
    package_findings,
    release,
    requirements,
    spark_findings,
    teller,
)

DRIVER = Place("driver", "here")
EXECUTOR = Place("executor 1", "there")
VERSIONS = dict.fromkeys(PACKAGES, "1.2.3") | {"pyspark": "4.1.1", "statelog": "0.1.0"}
INSTALLED = Installed("here", "3.11.4", "/python", VERSIONS)
CLUSTER = {"spark.master": "yarn", "spark.shuffle.reduceLocality.enabled": "false"}


def levels(conf: dict[str, str]) -> dict[str, str]:
    """The worst level of each check."""
    worst: dict[str, str] = {}
    for one in setting_findings(conf, DRIVER):
        worst[one.check] = max(worst.get(one.check, "ok"), one.level, key=["ok", "warning", "error"].index)
    return worst


def other(**changes: str) -> Installed:
    named = {name.replace("_", "-"): version for name, version in changes.items()}
    return Installed("there", "3.11.9", "/other", VERSIONS | named)


# ---- Settings ----


@pytest.mark.parametrize("conf", [{"spark.master": "local[4]"}, CLUSTER, CLUSTER | {"spark.authenticate": "false"}])
def test_good_settings_are_ok(conf: dict[str, str]) -> None:
    assert levels(conf) == {"placement": "ok", "encryption": "ok"}


def test_what_spark_spends_on_its_files_in_a_directory_is_told() -> None:
    def told(conf: dict[str, str], *, is_local: bool) -> list[tuple[str, bool]]:
        found = [one for one in setting_findings(conf, DRIVER, is_local=is_local) if one.check == "checkpoint-files"]
        return [(one.level, "spark_conf(local_checkpoints=True)" in one.found) for one in found]

    assert told(CLUSTER, is_local=True) == [("ok", True)]
    assert told(CLUSTER, is_local=False) == []
    assert told(CLUSTER | statelog.spark_conf(local_checkpoints=True), is_local=True) == []


@pytest.mark.parametrize(
    ("setting", "value", "check", "level", "told"),
    [
        ("spark.speculation", "TRUE", "placement", "error", "refuse to start"),
        ("spark.shuffle.reduceLocality.enabled", "true", "placement", "warning", "reduceLocality.enabled is not false"),
        ("spark.locality.wait", "0s", "placement", "warning", "spark.locality.wait is 0"),
        ("spark.sql.streaming.noDataMicroBatches.enabled", "false", "settings", "warning", "wait for the next data"),
        ("spark.network.crypto.enabled", "true", "encryption", "error", "spark.authenticate is not, so Spark encrypts"),
        ("spark.ssl.rpc.enabled", "true", "encryption", "warning", "trustStore is not set, so Spark accepts any"),
        ("spark.ssl.enabled", "true", "encryption", "warning", "applies only to Spark's web pages"),
        ("spark.authenticate", "true", "encryption", "warning", "but does not encrypt: the traffic between driver and"),
        ("spark.io.encryption.enabled", "true", "encryption", "warning", "local copies of state on the executors'"),
    ],
)
def test_a_setting_that_matters_is_a_finding(setting: str, value: str, check: str, level: str, told: str) -> None:
    found = [one for one in setting_findings(CLUSTER | {setting: value}, DRIVER) if one.level != "ok"]
    assert [(one.check, one.level) for one in found] == [(check, level)]
    assert told in found[0].found
    assert found[0].remedy


@pytest.mark.parametrize(
    ("settings", "is_told"),
    [
        ({}, True),
        ({"spark.master": "local[2]"}, False),
        ({"spark.excludeOnFailure.taskAndStage.enabled": "true"}, False),
        ({"spark.excludeOnFailure.enabled": "true"}, False),
        ({"spark.excludeOnFailure.enabled": "true", "spark.excludeOnFailure.taskAndStage.enabled": "false"}, True),
    ],
)
def test_the_setting_that_belongs_to_full_disks_is_told(settings: dict[str, str], is_told: bool) -> None:
    told = [one for one in setting_findings(CLUSTER | settings, DRIVER) if "taskAndStage.enabled=true" in one.found]
    assert [one.level for one in told] == ["ok"] * is_told


AES = {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}


@pytest.mark.parametrize(
    ("conf", "level"),
    [
        (AES, "warning"),
        (AES | {"spark.network.crypto.saslFallback": "false"}, "ok"),
        (AES | {"spark.authenticate.enableSaslEncryption": "true"}, "ok"),
        ({"spark.authenticate": "true", "spark.authenticate.enableSaslEncryption": "true"}, "ok"),
        ({"spark.ssl.rpc.enabled": "true", "spark.ssl.rpc.trustStore": "/trusted"}, "ok"),
        (AES | {"spark.ssl.rpc.enabled": "true", "spark.ssl.trustStore": "/trusted"}, "ok"),
    ],
)
def test_encrypted_traffic_is_ok_unless_it_can_be_made_to_be_in_clear(conf: dict[str, str], level: str) -> None:
    assert levels(conf)["encryption"] == level
    [told] = [one.found for one in setting_findings(conf, DRIVER) if one.check == "encryption" and one.level == "ok"]
    assert "Tasks call the driver with TLS" in told


def test_executors_with_subtasks_must_not_be_removed() -> None:
    dynamic = CLUSTER | {"spark.dynamicAllocation.enabled": "true"}
    assert levels(dynamic)["placement"] == "ok"
    removes = {"spark.dynamicAllocation.cachedExecutorIdleTimeout": "60s"}
    assert levels(dynamic | removes)["placement"] == "warning"
    assert levels(CLUSTER | removes)["placement"] == "ok"


# ---- Versions ----


@pytest.mark.parametrize(
    ("spark", "pyspark", "level"),
    [
        ("3.5.1", "3.5.1", "error"),
        ("4.0.2-amzn-0", "4.0.2+amzn.0", "ok"),
        ("4.3.0", "4.3.0", "ok"),
        ("4.4.0", "4.4.0", "warning"),
        ("4.1.1", "4.1.4", "warning"),
        ("4.1.1", "4.3.0", "error"),
    ],
)
def test_sparks_version(spark: str, pyspark: str, level: str) -> None:
    [found] = spark_findings(spark, pyspark, DRIVER)
    assert (found.check, found.level) == ("spark", level)
    assert spark in found.found


def test_the_numbers_of_a_version() -> None:
    assert release("4.0.2-amzn-0") == (4, 0, 2)
    assert release("20.0.0rc1")[:2] == (20, 0)
    assert release("unknown") == ()


def test_equal_packages_are_ok() -> None:
    [found] = package_findings(INSTALLED, EXECUTOR, other(), {"numpy": ">=1.2", "pyspark": ">=9"})
    assert (found.level, found.check) == ("ok", "packages")
    assert "numpy 1.2.3" in found.found


@pytest.mark.parametrize(
    ("changes", "level", "told"),
    [
        ({"statelog": "0.2.0"}, "error", "statelog 0.2.0 (driver: 0.1.0)"),
        ({"statelog": "unknown"}, "warning", "statelog unknown (driver: 0.1.0)"),
        ({"pyspark": "4.0.2"}, "error", "pyspark 4.0.2 (driver: 4.1.1)"),
        ({"pyspark": "4.1.4"}, "warning", "pyspark 4.1.4 (driver: 4.1.1)"),
        ({"pyspark": ""}, "ok", "numpy 1.2.3"),
        ({"rocksdict": "9.9"}, "ok", "rocksdict 9.9"),
        ({"pyarrow": "1.3.0"}, "warning", "pyarrow 1.3.0 (driver: 1.2.3)"),
        ({"msgspec": ""}, "error", "/other lacks msgspec"),
        ({"lazy_loader": ""}, "error", "/other lacks lazy-loader"),
        ({"rocksdict": ""}, "warning", "/other lacks rocksdict, which Options(table='rocksdb') needs"),
    ],
)
def test_other_packages_than_the_drivers(changes: dict[str, str], level: str, told: str) -> None:
    [found] = package_findings(other(**changes), EXECUTOR, INSTALLED)
    assert (found.level, found.check, found.where) == (level, "packages", "executor 1")
    assert told in found.found
    assert bool(found.remedy) == (level != "ok")


def test_another_spark_is_an_error_and_other_packages_are_a_warning() -> None:
    found = package_findings(other(pyspark="4.0.2", pyarrow="1.3.0", numpy="1.0"), EXECUTOR, INSTALLED)
    assert [(one.level, one.found) for one in found] == [
        ("error", "pyspark 4.0.2 (driver: 4.1.1)"),
        ("warning", "numpy 1.0 (driver: 1.2.3), pyarrow 1.3.0 (driver: 1.2.3)"),
    ]


def test_a_table_that_is_used_needs_its_package() -> None:
    [found] = package_findings(other(rocksdict=""), EXECUTOR, other(rocksdict=""), table="rocksdb")
    assert found.level == "error"
    for driver in (other(rocksdict=""), None):
        [found] = package_findings(other(rocksdict=""), EXECUTOR, driver)
        assert (found.level, "rocksdict" in found.found) == ("ok", False)


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.1.9", "warning"), ("2.2", "ok"), ("2.9.1", "ok"), ("3.0", "warning"), ("unknown", "ok")],
)
def test_versions_outside_of_the_declared_range(version: str, level: str) -> None:
    [found] = package_findings(other(pandas=version), DRIVER, needs={"pandas": ">=2.2,<3"})
    assert found.level == level
    assert (found.level == "ok") or "pip install 'pandas>=2.2,<3'" in found.remedy


def test_the_requirements_are_those_of_the_project() -> None:
    assert {"msgspec", "numpy", "obstore", "pandas", "pyarrow", "xxhash"} <= set(requirements())
    assert set(requirements()) >= set(PACKAGES) - {"statelog", "rocksdict", "pyspark"}


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (["numpy<3,>=2.2", "PyArrow >=15; extra == 'x'", ""], {"numpy": "<3,>=2.2", "pyarrow": ">=15"}),
        (None, {}),
        (importlib.metadata.PackageNotFoundError("statelog"), {}),
    ],
)
def test_the_requirements_as_the_metadata_has_them(
    monkeypatch: pytest.MonkeyPatch, declared: list[str] | Exception | None, expected: dict[str, str]
) -> None:
    def requires(name: str) -> list[str] | None:
        if isinstance(declared, Exception):
            raise declared
        return declared

    monkeypatch.setattr("importlib.metadata.requires", requires)
    assert requirements() == expected


def test_another_python_is_an_error() -> None:
    found = list(package_findings(Installed("there", "3.12.1", "/other", VERSIONS), EXECUTOR, INSTALLED))
    assert [(one.level, one.check) for one in found] == [("error", "python")]
    assert "/other is Python 3.12.1, but the driver runs Python 3.11.4" in found[0].found


def test_a_process_tells_its_packages() -> None:
    told = Installed(**teller(("numpy", "no-such-package"))())
    assert told.versions == {"numpy": numpy.__version__, "no-such-package": ""}
    assert told.executable == sys.executable
    assert told.python == ".".join(map(str, sys.version_info[:3]))


def test_packages_without_metadata_tell_their_version_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"of_a_zip": "__version__ = '1.2'", "of_no_version": "", "of_a_lack": "import no_such_module"}
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    told = teller(("of-a-zip", "of-no-version", "of-a-lack"))()["versions"]
    assert told == {"of-a-zip": "1.2", "of-no-version": "unknown", "of-a-lack": ""}


# ---- Local disks ----


def test_a_disk_with_room_is_ok(tmp_path: Path) -> None:
    [found] = check_disk(tmp_path, EXECUTOR, lambda _: 5_000_000_000)
    assert (found.level, found.check) == ("ok", "local-disk")
    assert "5.0 GB" in found.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free_bytes", "level"), [((1 << 30) - 1, "warning"), (1 << 30, "ok")])
def test_a_disk_that_is_nearly_full_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, level: str
) -> None:
    asked: list[Path] = []

    def usage(folder: Path) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(free=free_bytes)

    monkeypatch.setattr("shutil.disk_usage", usage)
    [found] = check_disk(tmp_path / "not made yet", EXECUTOR)
    assert (found.level, "local_directory" in found.remedy) == (level, level == "warning")
    assert "1.1 GB" in found.found
    assert asked == [tmp_path]


def test_a_disk_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems tell only then that they are full."""

    def sync(fd: int) -> None:
        raise OSError(errno.ENOSPC, f"{os.fstat(fd).st_size} bytes are too many")

    monkeypatch.setattr("os.fsync", sync)
    [found] = check_disk(tmp_path, EXECUTOR, lambda _: 5_000_000_000)
    assert found.level == "error"
    assert "cannot be written: 4096 bytes are too many" in found.found


def test_the_folder_need_not_exist_yet(tmp_path: Path) -> None:
    [found] = check_disk(tmp_path / "a" / "b", EXECUTOR, lambda _: 5_000_000_000)
    assert found.level == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_an_error() -> None:
    [found] = check_disk(Path("/proc/self"), EXECUTOR, lambda _: 5_000_000_000)
    assert (found.level, found.check) == ("error", "local-disk")
    assert "a file in /proc/self cannot be written" in found.found


def test_the_folder_of_other_queries_is_the_one_that_is_tried(tmp_path: Path) -> None:
    """It may belong to another user."""
    (tmp_path / "statelog").symlink_to("/proc/self")
    [found] = check_disk(tmp_path, EXECUTOR, lambda _: 5_000_000_000)
    assert found.level == "error"


def test_a_folder_that_cannot_be_looked_into_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(folder: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "exists", deny)
    [found] = check_disk(tmp_path, EXECUTOR, lambda _: 5_000_000_000)
    assert (found.level, found.check) == ("error", "local-disk")
    assert found.found.endswith("cannot be written: Permission denied.")
