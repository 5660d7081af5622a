"""Judges the Spark settings of an application."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from statelog.diagnosis.finding import Finding, Place
from statelog.spark.placement import may_have_several_executors, what_moves_subtasks

_SPECULATION: Final = "spark.speculation"
_DYNAMIC: Final = "spark.dynamicAllocation.enabled"
_CACHED_IDLE: Final = "spark.dynamicAllocation.cachedExecutorIdleTimeout"
NO_DATA: Final = "spark.sql.streaming.noDataMicroBatches.enabled"

_CALLS_IN_CLEAR: Final = (
    "the calls of tasks to the driver's port are in clear: whoever reads the network's traffic can read changes of"
    " state, with their keys and values. Both ends prove that they know a secret, but nothing is encrypted"
)
_NETWORK: Final = "Run driver and executors in a network that others cannot read, or encrypt it: a VPN, WireGuard."
_NOT_HONOURED: Final = {
    "spark.network.crypto.enabled": (_CALLS_IN_CLEAR, _NETWORK),
    "spark.authenticate.enableSaslEncryption": (_CALLS_IN_CLEAR, _NETWORK),
    "spark.ssl.enabled": (_CALLS_IN_CLEAR, _NETWORK),
    "spark.ssl.rpc.enabled": (_CALLS_IN_CLEAR, _NETWORK),
    "spark.authenticate": (
        "the driver's port has a secret of its own, which Spark brings to the tasks, in clear unless Spark encrypts its"
        " traffic; what follows the proof of it is in clear, too",
        _NETWORK,
    ),
    "spark.io.encryption.enabled": (
        "it covers Spark's own files only: the objects of the location are in clear, and operators refuse to start"
        " unless their options accept plain local copies of state on the executors' disks",
        "Set Options(plain_local_files=True), and encrypt the disks of the executors and the location.",
    ),
}
"""Settings of Spark that statelog does not follow: what is in clear all the same, and the remedy."""


def setting_findings(conf: Mapping[str, str], place: Place) -> Iterator[Finding]:
    """What the settings of an application, and of its session, mean for stateful operators."""
    yield from _of_placement(conf, place)
    if not _is_on(conf, NO_DATA, default=True):
        yield place.warning(
            "settings",
            f"{NO_DATA} is false: timers and windows of event time wait for the next data.",
            f"Remove {NO_DATA}, unless this is meant.",
        )
    yield from _of_encryption(conf, place)


def _of_placement(conf: Mapping[str, str], place: Place) -> Iterator[Finding]:
    if _is_on(conf, _SPECULATION):
        yield place.error(
            "placement",
            f"{_SPECULATION} is on, and stateful operators refuse to start: two attempts would run side by side.",
            f"Set {_SPECULATION} to false.",
        )
    if not may_have_several_executors(conf):
        yield place.ok("placement", "There is one executor, so subtasks cannot move.")
        return
    cause = what_moves_subtasks(conf)
    if cause:
        yield place.warning(
            "placement",
            f"Subtasks will not stay on their executors, and fetch state again and again, because {cause}.",
            "Give SparkSession.builder.config(map=statelog.spark_conf()) before the session is created, and leave"
            " spark.locality.wait at 3s; see docs/placement.md.",
        )
    else:
        yield place.ok("placement", "Spark's settings let subtasks stay on their executors.")
    if _is_on(conf, _DYNAMIC) and _CACHED_IDLE in conf:
        yield place.warning(
            "placement",
            f"{_CACHED_IDLE} is {conf[_CACHED_IDLE]}: Spark may remove executors that have subtasks, which then fetch"
            " their state elsewhere.",
            f"Remove {_CACHED_IDLE}: it is infinite by default.",
        )


def _of_encryption(conf: Mapping[str, str], place: Place) -> Iterator[Finding]:
    found = [(name, *told) for name, told in _NOT_HONOURED.items() if _is_on(conf, name)]
    for name, in_clear, remedy in found:
        yield place.warning("encryption", f"{name} is on, but {in_clear}.", remedy)
    if not found:
        yield place.ok("encryption", "No setting asks for encryption that statelog does not do.")


def _is_on(conf: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    return conf.get(name, str(default)).strip().lower() == "true"
