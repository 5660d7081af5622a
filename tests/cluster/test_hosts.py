"""Hosts are apart from each other, and nothing of them outlives the process that made them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, Network, missing_for_hosts, wait_until

CLOCK = Path(__file__).parent / "clock"
REPOSITORY = Path(__file__).parents[2]
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 7), timeout=1).close()"
SERVE = (
    "import socket, time; server = socket.create_server(('0.0.0.0', 7)); print('serves', flush=True); time.sleep(600)"
)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if missing := missing_for_hosts():
        pytest.skip(f"no hosts ({missing}); ./dev cluster installs what it can")
    with Network() as made:
        for name in ("one", "two", "three"):
            made.add(name, disk_bytes=1 << 20)
        log = made.shared / "serve.log"
        made.hosts["two"].start(sys.executable, "-c", SERVE, log=log, env=dict(os.environ))
        wait_until(lambda: log.read_text() == "serves\n", "the server")
        yield made


@pytest.fixture
def one(network: Network) -> Host:
    return network.hosts["one"]


@pytest.fixture
def two(network: Network) -> Host:
    return network.hosts["two"]


def reaches(host: Host, name: str) -> bool:
    try:
        host.run(sys.executable, "-c", CONNECT, name)
    except RuntimeError:
        return False
    return True


def test_a_host_has_its_own_name_and_reaches_the_others(one: Host) -> None:
    assert one.run("cat", "/proc/sys/kernel/hostname") == "one\n"
    assert reaches(one, "two")
    assert not one.run("ip", "route", "show", "default")


def test_a_host_that_is_cut_off_is_reached_by_no_one(network: Network, one: Host, two: Host) -> None:
    two.cut()
    assert not reaches(one, "two")
    two.join()
    assert reaches(one, "two")


def test_packets_between_two_hosts_are_lost(network: Network, one: Host) -> None:
    one.drop("two")
    assert not reaches(one, "two")
    assert reaches(network.hosts["three"], "two")
    one.deliver("two")
    assert reaches(one, "two")


def test_a_cable_can_be_slow_and_lose_frames(network: Network, one: Host, two: Host) -> None:
    def round_trip_s() -> float:
        began_s = time.monotonic()
        assert reaches(one, "two")
        return time.monotonic() - began_s

    normal_s = round_trip_s()
    two.slow_down(0.2, 0.0)
    assert round_trip_s() > 0.4
    two.speed_up()
    two.slow_down(0.0, 1.0)
    assert not reaches(one, "two")
    two.speed_up()
    assert round_trip_s() < normal_s + 0.4


def test_a_host_that_is_frozen_accepts_connections_and_goes_on(two: Host, one: Host) -> None:
    [server] = two.processes("serves")
    two.freeze()
    assert Path(f"/proc/{server}/stat").read_text().split(")")[1].split()[0] == "T"
    assert reaches(one, "two"), "its kernel goes on"
    two.thaw()
    assert Path(f"/proc/{server}/stat").read_text().split(")")[1].split()[0] != "T"


def test_disks_are_apart_and_can_be_full_or_lost(network: Network, one: Host) -> None:
    file = f"{one.disk}/file"
    one.run("sh", "-c", f"echo kept >{file}")
    with pytest.raises(RuntimeError, match="No such file"):
        network.hosts["two"].run("cat", file)
    one.fill_disk()
    with pytest.raises(RuntimeError, match="No space left"):
        one.run("cp", file, f"{one.disk}/other")
    one.free_disk()
    assert one.run("cat", file) == "kept\n"
    one.lose_disk()
    with pytest.raises(RuntimeError, match="No such file"):
        one.run("cat", file)
    with pytest.raises(RuntimeError, match="Read-only"):
        one.run("touch", f"{one.disk}/other")
    one.replace_disk(1 << 20)
    one.run("touch", f"{one.disk}/other")


def test_processes_without_a_parent_leave_no_zombies(one: Host) -> None:
    before = one.processes()
    one.run("sh", "-c", "(sleep 0.1 &) ; true")
    wait_until(lambda: one.processes() == before, "the orphan to be gone")


def test_the_clock_of_python_can_be_moved(one: Host) -> None:
    env = {"PYTHONPATH": str(CLOCK), "TESTS_CLOCK_AHEAD_S": "-600"}
    found = float(one.run(sys.executable, "-c", "import time; print(time.time())", env=env))
    assert found == pytest.approx(time.time() - 600, abs=60)


def test_nothing_outlives_a_process_that_is_killed(network: Network) -> None:
    program = (
        "from tests.cluster.hosts import Network\n"
        "with Network() as network:\n"
        "    host = network.add('one')\n"
        "    print(*host.processes(), network.directory, flush=True)\n"
        "    input()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    made = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert made.stdout is not None
    [init, directory] = made.stdout.readline().split()
    assert Path(f"/proc/{init}").exists()
    made.send_signal(signal.SIGKILL)
    made.communicate()
    wait_until(lambda: not Path(f"/proc/{init}").exists(), "the host to end")
    assert directory not in Path("/proc/mounts").read_text()
    shutil.rmtree(directory)


def test_a_host_writes_nothing_into_a_protected_directory(network: Network, one: Host, two: Host) -> None:
    directory = network.shared / "protected"
    directory.mkdir()
    one.protect(directory)
    with pytest.raises(RuntimeError, match="Read-only file system"):
        one.run("touch", f"{directory}/one")
    two.run("touch", f"{directory}/two")
    assert one.run("ls", str(directory)) == "two\n"
    one.release(directory)
    one.run("touch", f"{directory}/one")
