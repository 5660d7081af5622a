"""Clients of object stores: made at the first request, shared within a process, never used across a fork."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from obstore.store import AzureStore, GCSStore, S3Store

from statelog.errors import ConfigurationError, StorageError
from statelog.storage.aws_profile import profile_arguments
from statelog.storage.location import AZURE_HOST

Client = S3Store | GCSStore | AzureStore

_CLASSES: Final[dict[str, type[S3Store] | type[GCSStore] | type[AzureStore]]] = {
    "s3": S3Store,
    "gs": GCSStore,
    "az": AzureStore,
}
_CONNECT_TIMEOUT: Final = "5000 ms"
_SETTINGS: Final = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}


@dataclass(frozen=True, slots=True)
class Bucket:
    """The bucket of a client, and the limit of its requests."""

    service: str
    """``s3``, ``gs`` or ``az``."""
    name: str
    """The bucket; for ``az`` the container, or ``container@host of the account``."""
    timeout_s: float
    """Limit of a whole request."""


class Clients:
    """The clients of this process, one per bucket.

    A client costs some 10 ms to make and a handshake per connection, and stores are made for every task; so the stores
    of one bucket share a client. It is made again after the settings in the environment have changed.

    Clients may be called from any thread. Two threads may make a client at the same time without harm, so there is no
    lock that a fork could copy.
    """

    def __init__(self) -> None:
        self._made: dict[Bucket, tuple[dict[str, str], Client]] = {}
        self._were_used = False
        self._is_fork = False
        os.register_at_fork(after_in_child=self._start_fork)

    def get(self, bucket: Bucket) -> Client:
        """Return the client for the next request.

        In a fork of a process that has made requests this raises StorageError: the client library's threads exist only
        in the parent, and any request would wait for them forever. Settings that are not enough for a client raise
        ConfigurationError.
        """
        if self._is_fork:
            raise StorageError(
                f"{bucket.name} cannot be reached: this process is a fork of one that has used an object store.",
                hint="Start processes with the method 'spawn' of multiprocessing, or fork before the first request.",
            )
        prefix = _SETTINGS[bucket.service]
        settings = {name: value for name, value in os.environ.items() if name.startswith(prefix)}
        made_with, client = self._made.get(bucket, (None, None))
        if client is None or made_with != settings:
            client = _make_client(bucket, settings)
            self._were_used = True  # first, as another thread may fork at any time
            self._made[bucket] = settings, client
        return client

    def forget(self, bucket: Bucket) -> None:
        """Drop the client of a bucket; its connections end with the requests under way."""
        if not self._is_fork:
            self._made.pop(bucket, None)

    def _start_fork(self) -> None:
        # The parent's clients stay: to drop one takes a lock, which a thread of the parent may have held just now.
        self._is_fork = self._were_used


def _require_addresses(settings: Mapping[str, str], whose: str) -> None:
    for name, value in settings.items():
        if ("ENDPOINT" in name or name.endswith("_URL")) and not value.startswith(("http://", "https://")):
            # The client library would fail with an assertion instead.
            raise ConfigurationError(
                f"The {whose} {name} does not start with http:// or https://.", hint="Write it as an address."
            )


def _make_client(bucket: Bucket, settings: Mapping[str, str]) -> Client:
    """Make a client; everything but bucket and limits comes from the environment, or the profile that it names."""
    _require_addresses(settings, "environment's")
    profile, credentials = profile_arguments(settings) if bucket.service == "s3" else ({}, {})
    _require_addresses(profile, "profile's")
    # Limits go among the settings: client_options would replace those of the environment.
    limits = {"timeout": f"{round(bucket.timeout_s * 1000)} ms", "connect_timeout": _CONNECT_TIMEOUT}
    config: Any = {**profile, **limits}
    # No retries by the client: it would take an object that its own first attempt created for somebody else's.
    name, _, account = bucket.name.partition("@")
    if account:
        config["account_name"] = account.removesuffix(AZURE_HOST)
    try:
        return _CLASSES[bucket.service](name, config=config, retry_config={"max_retries": 0}, **credentials)
    except Exception as error:
        reason = str(error).partition("\n")[0].rpartition("error: ")[2]
        raise ConfigurationError(
            f"The bucket {bucket.name} cannot be used: {reason}.",
            hint=f"Settings are taken from the environment's {_SETTINGS[bucket.service]}*; see docs/object-stores.md.",
        ) from None
