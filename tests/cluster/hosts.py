"""Several hosts on one machine: each is a set of namespaces, and all are on one switch, without a route elsewhere.

A host has an address, process numbers, a hostname and a disk of limited size. Of the machine's other files it sees all.
Everything ends with the process that made the network, even if that process is killed. This needs Linux, its superuser,
iproute2 and util-linux.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tests.servers import LocalServer

PROGRAMS: Final = ("ip", "unshare", "nsenter", "setpriv", "mount")

_SUBNET: Final = "10.99.0"
_TIMEOUT_S: Final = 30.0
_DISK_BYTES: Final = 128 << 20
_NEW: Final = (
    "unshare",
    "--net",
    "--mount",
    "--uts",
    "--ipc",
    "--pid",
    "--fork",
    "--kill-child",
    "--propagation=private",
)

# The first process of a host: orphans become its children, and leave no zombies because it ignores their ends.
_INIT: Final = """
set -e
mount -t proc proc /proc
echo "$1" >/proc/sys/kernel/hostname
mount -t tmpfs -o "size=$3" tmpfs "$2/disk"
mkdir "$2/disk/tmp"
mount --bind "$2/names" /etc/hosts
ip link set lo up
echo ready
exec env --ignore-signal=CHLD sleep infinity
"""

# An unused MAC address: the bridge floods frames sent to it, and every host discards them.
_NOBODY: Final = "02:00:00:00:00:01"


def missing_for_hosts() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if not sys.platform.startswith("linux"):
        return "this is not Linux"
    if os.geteuid() != 0:
        return "only root may make namespaces"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"{absent[0]} is missing"
    attempt = "mount -t proc proc /proc && mount -t tmpfs tmpfs /mnt && ip link add switch type bridge"
    attempt += " && ip link add one type veth peer name two"
    made = subprocess.run((*_NEW, "sh", "-c", attempt), capture_output=True, text=True, timeout=_TIMEOUT_S)
    return (made.stderr.strip().splitlines() or ["unshare fails"])[0] if made.returncode else ""


def wait_until(is_done: Callable[[], bool], what: str, timeout_s: float = _TIMEOUT_S) -> None:
    """Wait for something; TimeoutError if it does not happen."""
    deadline_s = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.05)


class Network(LocalServer):
    """A switch and its hosts, as a context manager.

    `shared` is a directory that all hosts see, as if it were mounted from a file server that never fails; `disk` is
    the path of each host's own disk.
    """

    def __init__(self) -> None:
        super().__init__("cluster")
        self.shared = self.directory / "shared"
        self.disk = self.directory / "disk"
        self.hosts: dict[str, Host] = {}
        self._names = self.directory / "names"
        self._addresses: dict[str, str] = {}

    def add(self, name: str, *, disk_bytes: int = _DISK_BYTES, other_name: str = "") -> Host:
        """Switch a host on. A name keeps its address; with `other_name` the host has a second address of that name."""
        addresses = [self.address(each) for each in (name, other_name) if each]
        log = self.directory / f"{name}.log"
        with log.open("ab") as errors:
            process = self._spawn(
                *(*_NEW, "sh", "-c", _INIT, "sh", name, str(self.directory), str(disk_bytes)),
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        _await_line(process, "ready", f"Host {name} did not start, see {log}.")
        host = self.hosts[name] = Host(self, name, addresses, process)
        return host

    def address(self, name: str) -> str:
        """The address of a name, which all hosts know."""
        if name not in self._addresses:
            self._addresses[name] = f"{_SUBNET}.{len(self._addresses) + 2}"
            with self._names.open("a") as names:
                names.write(f"{self._addresses[name]} {name}\n")
        return self._addresses[name]

    def on_switch(self, *command: str, must: bool = True) -> None:
        """Run a command where the hosts' cables end."""
        _run("nsenter", "--net", "--target", str(self._switch.pid), *command, must=must)

    def spawn(self, *command: str, **how: Any) -> subprocess.Popen[Any]:
        """Start a process that ends with this one; `how` is for Popen."""
        return self._spawn(*command, **how)

    def lay_wire(self, first: str, second: str, delay_s: float, loss: float, seed: int) -> subprocess.Popen[Any]:
        """Start the process that forwards between two interfaces of the switch."""
        program = Path(__file__).with_name("wire.py")
        wire = self._spawn(
            *("nsenter", "--net", "--target", str(self._switch.pid), sys.executable, str(program)),
            *(first, second, str(delay_s), str(loss), str(seed)),
            stdout=subprocess.PIPE,
        )
        _await_line(wire, "ready", f"The wire between {first} and {second} was not laid.")
        return wire

    def stop(self) -> None:
        """Switch all hosts off, and remove everything."""
        for host in list(self.hosts.values()):
            host.switch_off()
        super().stop()

    def _start(self) -> None:
        self.shared.mkdir()
        self.disk.mkdir()
        self._names.write_text("127.0.0.1 localhost\n")
        self._switch = self._spawn("unshare", "--net", "sleep", "infinity")
        own = os.readlink("/proc/self/ns/net")
        wait_until(lambda: os.readlink(f"/proc/{self._switch.pid}/ns/net") != own, "the switch")
        self.on_switch("ip", "link", "add", "switch", "type", "bridge")
        self.on_switch("ip", "link", "set", "switch", "up")


class Host:
    """A host that is switched on; :meth:`Network.add` makes it.

    Parameters
    ----------
    network : Network
        Where it is.
    name : str
        Its name, which all hosts know.
    addresses : list of str
        Its own, the first of which belongs to the name.
    process : Popen
        The parent of its first process, which ends with the host.
    """

    def __init__(self, network: Network, name: str, addresses: list[str], process: subprocess.Popen[Any]) -> None:
        self.name = name
        self.address = addresses[0]
        self.disk = network.disk
        self._network = network
        self._process = process
        self._namespace = os.readlink(f"/proc/{process.pid}/ns/pid_for_children")
        [self._init] = [pid for pid in self.processes() if _number_within(pid) == 1]
        self._started: list[subprocess.Popen[Any]] = []
        self._port = f"port-{name}"
        network.on_switch("ip", "link", "add", self._port, "type", "veth", "peer", "name", f"end-{name}")
        network.on_switch("ip", "link", "set", f"end-{name}", "netns", str(self._init), "name", "eth0")
        network.on_switch("ip", "link", "set", self._port, "master", "switch", "up")
        for address in addresses:
            self.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    # ---- Processes ----

    def start(self, *command: str, log: Path, env: Mapping[str, str]) -> subprocess.Popen[Any]:
        """Start a process on the host; its exit code is that of the returned one."""
        with log.open("ab") as sink:
            process = self._network.spawn(*self._enter(), *command, env=env, stdout=sink, stderr=subprocess.STDOUT)
        self._started.append(process)
        return process

    def run(self, *command: str, must: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Run a short command on the host, and return what it says; with `must` it has to succeed."""
        return _run(*self._enter(), *command, must=must, env=env)

    def processes(self, words: str = "") -> list[int]:
        """The processes of the host whose command line has some words, by their numbers on this machine."""
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal():
                with suppress(OSError):
                    if os.readlink(f"/proc/{entry.name}/ns/pid") == self._namespace and words in _command(entry.name):
                        found.append(int(entry.name))
        return sorted(found)

    def kill(self, words: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the processes whose command line has some words, of which there must be one."""
        found = self.processes(words)
        if not found:
            raise RuntimeError(f"no process on {self.name} has {words!r} in its command line")
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def freeze(self) -> None:
        """Stop all processes. Their connections stay open, and the kernel goes on receiving for them."""

        def is_frozen() -> bool:
            running = [pid for pid in self.processes() if _state(pid) not in "TtZX"]
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            return not running

        wait_until(is_frozen, f"the processes of {self.name} to stop")

    def thaw(self) -> None:
        """Let them go on."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for process in self._started:  # it stops when its child does
            process.send_signal(signal.SIGCONT)

    def switch_off(self) -> None:
        """End the host at once: the others hear nothing of it."""
        self._network.on_switch("ip", "link", "set", self._port, "down", must=False)
        with suppress(ProcessLookupError):
            os.kill(self._init, signal.SIGKILL)
        self._process.wait()  # for the end of all its processes
        self._network.on_switch("ip", "link", "del", self._port, must=False)
        self._network.hosts.pop(self.name, None)

    # ---- The network ----

    def cut(self) -> None:
        """Pull the cable."""
        self._network.on_switch("ip", "link", "set", self._port, "down")

    def join(self) -> None:
        """Plug it in again."""
        self._network.on_switch("ip", "link", "set", self._port, "up")

    def drop(self, name: str) -> None:
        """Lose all packets to an address, by its name, without an error."""
        address = self._network.address(name)
        self.run("ip", "neigh", "replace", address, "lladdr", _NOBODY, "nud", "permanent", "dev", "eth0")

    def deliver(self, name: str) -> None:
        """Lose them no longer."""
        self.run("ip", "neigh", "del", self._network.address(name), "dev", "eth0")

    def slow_down(self, delay_s: float, loss: float, seed: int = 0) -> None:
        """Let frames from and to the host take longer, and lose a share of them."""
        near, far = f"near-{self.name}", f"far-{self.name}"
        self._network.on_switch("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        self._network.on_switch("ip", "link", "set", self._port, "nomaster")
        self._network.on_switch("ip", "link", "set", near, "up")
        self._network.on_switch("ip", "link", "set", far, "master", "switch", "up")
        self._wire = self._network.lay_wire(self._port, near, delay_s, loss, seed)

    def speed_up(self) -> None:
        """Undo :meth:`slow_down`."""
        self._wire.kill()
        self._wire.wait()
        self._network.on_switch("ip", "link", "del", f"near-{self.name}")
        self._network.on_switch("ip", "link", "set", self._port, "master", "switch")

    # ---- The disk ----

    def fill_disk(self) -> None:
        """Write until nothing fits any more."""
        self.run("sh", "-c", f"cat /dev/zero >>{self.disk}/filler", must=False)

    def free_disk(self) -> None:
        """Take back what :meth:`fill_disk` has written."""
        self.run("rm", f"{self.disk}/filler")

    def lose_disk(self) -> None:
        """Make the disk's files disappear; nothing can be written."""
        self.run("mount", "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", str(self.disk))

    def replace_disk(self, size_bytes: int = _DISK_BYTES) -> None:
        """Put an empty disk in its place."""
        self.run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(self.disk))
        self.run("mkdir", f"{self.disk}/tmp")

    # ---- Directories that all hosts see ----

    def protect(self, directory: Path) -> None:
        """Let the host write nothing into a directory, as if its file server refused to."""
        self.run("mount", "--bind", str(directory), str(directory))
        self.run("mount", "-o", "remount,bind,ro", str(directory))

    def release(self, directory: Path) -> None:
        """Undo :meth:`protect`."""
        self.run("umount", "--lazy", str(directory))

    def _enter(self) -> tuple[str, ...]:
        return ("nsenter", "--net", "--mount", "--uts", "--ipc", "--pid", "--target", str(self._init))


def _await_line(process: subprocess.Popen[Any], line: str, error: str) -> None:
    """Wait until a process prints a line; RuntimeError if it does not."""
    assert process.stdout is not None
    is_there = select.select([process.stdout], [], [], _TIMEOUT_S)[0]
    if not is_there or process.stdout.readline().decode().strip() != line:
        raise RuntimeError(error)


def _run(*command: str, must: bool, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if must and done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
    return done.stdout


def _command(pid: str) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _number_within(pid: int) -> int:
    """A process's number in the innermost namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [numbers] = [line.split()[1:] for line in lines if line.startswith("NSpid:")]
    return int(numbers[-1])
