"""Checks the way from a task to the driver's port, and how far the two clocks are apart."""

from __future__ import annotations

from typing import Final

from statelog.checkpoint.protocol import Ping, Pinged
from statelog.clock import Clock
from statelog.diagnosis.finding import Finding, Place
from statelog.diagnosis.limited import Findings
from statelog.errors import ProtocolError
from statelog.spark.rpc import RpcClient
from statelog.spark.rpc_channel import RpcPolicy
from statelog.spark.worker import DriverAddress

_PINGS: Final = 5
_CLOCK_LIMIT_S: Final = 5.0
_LOOPBACK: Final = ("127.", "localhost", "::1")


def check_driver_port(address: DriverAddress, place: Place, clock: Clock, timeout_s: float) -> Findings:
    """Connect to the driver's endpoint as tasks do, and compare the clocks."""
    where = f"{address.host}:{address.port}"
    policy = RpcPolicy(call_timeout_s=timeout_s, handshake_timeout_s=timeout_s)
    try:
        client = RpcClient(
            address.host, address.port, address.secret, policy, certificate=address.certificate, clock=clock
        )
        try:
            trips = [_round_trip(client, clock, place.host) for _ in range(_PINGS)]
        finally:
            client.close()
    except ProtocolError as error:
        yield place.error("driver-port", error.message[:1].upper() + error.message[1:], _remedy(address, error))
        return
    trip_s, ahead_s = min(trips)
    yield place.ok("driver-port", f"{where} answers in {trip_s * 1000:.1f} ms.")
    yield clock_finding(ahead_s, trip_s, place)


def clock_finding(ahead_s: float, trip_s: float, place: Place) -> Finding:
    """Judge how far a clock is ahead of the driver's, after a round trip in which the reply may be made at any time."""
    if abs(ahead_s) - trip_s / 2 <= _CLOCK_LIMIT_S:
        return place.ok("clock", f"The clock is {abs(ahead_s):.3f} s off the driver's.")
    return place.warning(
        "clock",
        f"The clock is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the driver's.",
        "Have NTP (chrony, systemd-timesyncd) set the clocks of all hosts: the ages of stored objects and of pins"
        " are measured between them, and object stores refuse requests of a wrong time.",
    )


def _round_trip(client: RpcClient, clock: Clock, host: str) -> tuple[float, float]:
    """How long a call takes, and how far this clock is ahead of the driver's, in seconds."""
    begun_s, now_s = clock.monotonic_s(), clock.now_s()
    reply = client.call(Ping(f"the doctor on {host}"))
    trip_s = clock.monotonic_s() - begun_s
    assert isinstance(reply, Pinged)
    return trip_s, now_s + trip_s / 2 - reply.now_s


def _remedy(address: DriverAddress, error: ProtocolError) -> str:
    if address.host.startswith(_LOOPBACK):
        return (
            f"{address.host} is every host's own address: set spark.driver.host, or spark.statelog.coordinator.host, to"
            " an address of the driver that the executors reach."
        )
    return (
        f"{error.hint.rstrip('.')}, and open that port in firewalls, security groups and network policies. If"
        " it is unset, any free port is taken. spark.driver.bindAddress is the address that the driver listens on."
    )
