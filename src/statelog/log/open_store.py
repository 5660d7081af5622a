"""Makes the store of a location, as the options say: unless it is a directory, requests are repeated and hedged."""

from __future__ import annotations

from statelog.clock import Clock, SystemClock
from statelog.metrics import Measurements, Recorder
from statelog.options import Options
from statelog.storage import LocalStore, Store, open_store
from statelog.storage.retry import RetryingStore, RetryPolicy


def open_retrying_store(location: str, options: Options, clock: Clock, recorder: Recorder) -> Store:
    """Make the store of a location; nothing is opened yet."""
    store = open_store(location)
    if isinstance(store, LocalStore):
        return store  # the operating system repeats whatever can be repeated
    if options.upload_attempts == 1:
        policy = RetryPolicy.none()
    else:
        policy = RetryPolicy(options.upload_attempts, options.upload_timeout_s, options.upload_retry_delay_s)
    return RetryingStore(store, policy, clock=clock, recorder=recorder)


def open_location(location: str) -> Store:
    """Make the store of a location with the default options, outside of a running query."""
    return open_retrying_store(location, Options(), SystemClock(), Measurements())
