"""What is done to the hosts, each under its name."""

from __future__ import annotations

import heapq
import signal
from collections.abc import Callable, Iterator
from typing import Final

from tests.cluster.hosts import Host
from tests.cluster.life import RECOVERY_S, Difference, Harm, Life
from tests.cluster.spark_hosts import (
    BROKER,
    DRIVER_JVM,
    DRIVER_PROGRAM,
    EXECUTOR,
    MASTER,
    NETWORK_TIMEOUT_S,
    PYTHON_DAEMON,
    WORKER,
    calls_name,
)

OUTAGE_S: Final = 1.5 * NETWORK_TIMEOUT_S
"""How long hosts do not answer: longer than Spark waits for them."""
SHORT_S: Final = 15.0
DELAY_S: Final = 0.05
LOSS: Final = 0.05
CLOCKS_APART_S: Final = 600


def _executor_killed(life: Life) -> Iterator[float]:
    life.busy_worker().kill(EXECUTOR)
    yield 0


def _python_daemon_killed(life: Life) -> Iterator[float]:
    life.busy_worker().kill(PYTHON_DAEMON)
    yield 0


def _driver_killed(life: Life) -> Iterator[float]:
    killed, life.home = life.driver, _other_home(life)
    killed.host.kill(DRIVER_PROGRAM)
    yield 0


def _driver_jvm_killed(life: Life) -> Iterator[float]:
    life.driver.host.kill(DRIVER_JVM)
    yield 0


def _driver_host_lost(life: Life) -> Iterator[float]:
    lost, life.home = life.driver.host, _other_home(life)
    lost.switch_off()
    yield 0


def _host_frozen(life: Life) -> Iterator[float]:
    host = life.busy_worker()
    host.freeze()
    yield OUTAGE_S
    host.thaw()


def _host_off_the_network(life: Life) -> Iterator[float]:
    host = life.busy_worker()
    host.cut()
    yield OUTAGE_S
    host.join()


def _network_slow(life: Life) -> Iterator[float]:
    host = life.busy_worker()
    host.slow_down(DELAY_S, LOSS)
    yield OUTAGE_S
    host.speed_up()


def _host_lost(life: Life) -> Iterator[float]:
    life.busy_worker().switch_off()
    yield 0


def _store_lost_by_the_driver(life: Life) -> Iterator[float]:
    yield from _store_lost(life, life.driver.host)


def _store_lost_by_a_worker(life: Life) -> Iterator[float]:
    yield from _store_lost(life, life.busy_worker())


def _store_lost(life: Life, host: Host) -> Iterator[float]:
    store = life.cluster.host("store")
    host.drop("store")
    store.drop(host.name)
    yield SHORT_S
    host.deliver("store")
    store.deliver(host.name)


def _calls_lost(life: Life) -> Iterator[float]:
    """The executors' own connections to the driver go on."""
    hosts, calls = life.cluster.workers, calls_name(life.driver.host.name)
    for host in hosts:
        host.drop(calls)
    yield OUTAGE_S
    for host in hosts:
        host.deliver(calls)


def _disk_full(life: Life) -> Iterator[float]:
    host = life.busy_worker()
    for _ in range(3):
        host.fill_disk()
        yield SHORT_S / 3
    host.free_disk()


def _disk_lost(life: Life) -> Iterator[float]:
    host = life.busy_worker()
    host.lose_disk()
    yield SHORT_S
    life.cluster.stop_worker(host.name)
    host.replace_disk()
    life.cluster.start_workers(host.name)


def _workers_removed_and_added(life: Life) -> Iterator[float]:
    leaving = [life.busy_worker().name]
    leaving += [host.name for host in life.cluster.workers if host.name not in leaving][:1]
    for name in leaving:
        life.cluster.host(name).kill(WORKER, signal.SIGPWR)
    yield SHORT_S
    for name in leaving:
        life.cluster.stop_worker(name)
    life.cluster.start_workers("worker4")
    yield SHORT_S
    life.cluster.host("worker4").switch_off()


def _two_drivers(life: Life) -> Iterator[float]:
    """A second driver starts while the first is off the network; the first must end when it is back."""
    first, life.home = life.driver, _other_home(life)
    first.host.cut()
    life.start_driver()
    while not life.driver.outputs:
        yield 1
    first.host.join()
    life.wait_until(lambda: first.process.poll() is not None, "the first driver to end", RECOVERY_S)
    found = [failure["kind"] for failure in first.failures]
    if first.process.poll() != 3 or found[-1] not in ("newer-epoch", "concurrent-run"):
        raise Difference(f"the first driver has ended with {first.process.poll()}, {first.failures}")


def _checkpoint_lost(life: Life) -> Iterator[float]:
    """The driver that is started meanwhile on the same host fails, too."""
    host, checkpoint = life.driver.host, life.cluster.checkpoint
    host.protect(checkpoint)
    yield SHORT_S
    host.release(checkpoint)


def _master_killed(life: Life) -> Iterator[float]:
    life.cluster.host("master").kill(MASTER)
    yield SHORT_S
    life.cluster.start_master()


def _broker_killed(life: Life) -> Iterator[float]:
    """The program of its host starts it again."""
    life.cluster.host("broker").kill(BROKER)
    yield SHORT_S


def _broker_off_the_network(life: Life) -> Iterator[float]:
    host = life.cluster.host("broker")
    host.cut()
    yield OUTAGE_S
    host.join()


def _at_once(*harms: Callable[[Life], Iterator[float]]) -> Callable[[Life], Iterator[float]]:
    """All of these, begun at the same time; one of them at most may choose a busy worker."""

    def does(life: Life) -> Iterator[float]:
        now_s, due = 0.0, [(0.0, number, harm(life)) for number, harm in enumerate(harms)]
        while due:
            at_s, number, harm = heapq.heappop(due)
            yield at_s - now_s
            now_s = at_s
            if (seconds := next(harm, None)) is not None:
                heapq.heappush(due, (now_s + seconds, number, harm))

    return does


def _clocks_apart(life: Life) -> Iterator[float]:
    host, killed = life.busy_worker(), life.driver
    life.cluster.stop_worker(host.name)
    life.cluster.start_workers(host.name, clock_ahead_s=CLOCKS_APART_S // 2)
    life.clock_ahead_s = -CLOCKS_APART_S // 2
    killed.host.kill(DRIVER_PROGRAM)
    life.wait_until(lambda: life.driver is not killed and bool(life.driver.outputs), "the driver with another clock")
    yield SHORT_S
    life.clock_ahead_s = 0
    life.driver.host.kill(DRIVER_PROGRAM)
    life.cluster.stop_worker(host.name)


def _other_home(life: Life) -> str:
    return "driver2" if life.driver.host.name == "driver" else "driver"


_OF_SPARK: Final = frozenset({""})
"""The query ends with an error of Spark's own."""
_UNREACHABLE: Final = frozenset({"store-unavailable"})
_DISK: Final = frozenset({"local-disk"})

HARMS: Final = {
    "executor-killed": Harm("an executor is killed", _executor_killed),
    "python-daemon-killed": Harm("the Python daemon of an executor is killed", _python_daemon_killed),
    "driver-killed": Harm("the driver's Python process is killed; the next start is on another host", _driver_killed),
    "driver-jvm-killed": Harm("the driver's JVM is killed", _driver_jvm_killed),
    "driver-host-lost": Harm("the driver's host is switched off; the next start is on another one", _driver_host_lost),
    "host-frozen": Harm("all processes of a worker's host stop, and go on", _host_frozen),
    "host-off-the-network": Harm("a worker's host is off the network", _host_off_the_network),
    "network-slow": Harm("50 ms more each way to a worker's host, and 5% of frames lost", _network_slow),
    "host-lost": Harm("a worker's host is switched off", _host_lost),
    "store-lost-by-the-driver": Harm("the driver does not reach the store", _store_lost_by_the_driver, _UNREACHABLE),
    "store-lost-by-a-worker": Harm("a worker's host does not reach the store", _store_lost_by_a_worker, _UNREACHABLE),
    "calls-lost": Harm("packets to the coordinator are lost", _calls_lost, frozenset({"rpc"})),
    "disk-full": Harm("the disk of a worker's host is full", _disk_full, _DISK),
    "disk-lost": Harm("the disk of a worker's host is lost, and replaced", _disk_lost, _DISK),
    "workers-removed-and-added": Harm(
        "two workers are decommissioned, another one is added", _workers_removed_and_added
    ),
    "clocks-apart": Harm("the clocks of Python on the driver and on a worker are 10 minutes apart", _clocks_apart),
    "checkpoint-lost": Harm("the driver cannot write to the checkpointLocation", _checkpoint_lost, _OF_SPARK),
    "broker-killed": Harm("the Kafka broker is killed, and started again 10 s later", _broker_killed, _OF_SPARK, True),
    "broker-off-the-network": Harm(
        "the Kafka broker's host is off the network", _broker_off_the_network, _OF_SPARK, True
    ),
    "master-killed": Harm("Spark's master is killed, and started again", _master_killed),
    "master-killed-and-host-lost": Harm(
        "a worker's host is switched off while there is no master", _at_once(_master_killed, _host_lost)
    ),
    "store-lost-and-executor-killed": Harm(
        "an executor is killed while the driver does not reach the store",
        _at_once(_store_lost_by_the_driver, _executor_killed),
        _UNREACHABLE,
    ),
    "disk-full-and-calls-lost": Harm(
        "the disk of a worker's host is full while packets to the coordinator are lost",
        _at_once(_disk_full, _calls_lost),
        _DISK | {"rpc"},
    ),
    "driver-killed-and-host-frozen": Harm(
        "the driver is killed while all processes of a worker's host stop, and go on",
        _at_once(_host_frozen, _driver_killed),
    ),
    "two-drivers": Harm(
        "a second driver starts while the first is off the network",
        _two_drivers,
        frozenset({"newer-epoch", "concurrent-run"}),
    ),
}
