"""Makes pins: writes one, sees whether it holds, renews and removes it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final, TypeVar

from msgspec.structs import replace

from statelog.clock import Clock, SystemClock
from statelog.errors import PinExpiredError, StatelogError, StorageError
from statelog.history.pins import Pin, PinnedBase, holding_pins, pin_name, write_pin
from statelog.history.query_history import QueryHistory, read_history
from statelog.storage import Store

_ATTEMPTS: Final = 5

_Result = TypeVar("_Result")


def retry_given_up(
    attempt: Callable[[], _Result],
    *,
    is_fixed: bool = False,
    errors: tuple[type[StatelogError], ...] = (PinExpiredError,),
) -> _Result:
    """Choose a checkpoint and read it, or pin it; again if it was given up meanwhile, as its query runs.

    One that `is_fixed`, because a user has named it, is not there again. `errors` say that a checkpoint was given up.
    """
    for _ in range(1 if is_fixed else _ATTEMPTS):
        try:
            return attempt()
        except errors as error:
            last = error
    raise last


class HeldPin:
    """A pin that its maker renews, and removes at the end.

    `operators` are the identities of the operators that it keeps; None for all of the query. `lasts_s` is None for a
    pin that does not expire. `since` is that of :meth:`Pin.of`; with `max_bytes` too, it is a consumer's, which may
    need a `base`, see :meth:`Pin.of_changes`. With `is_shared` others may rely on it too. `branch` is that of
    :class:`Pin`.

    Making one raises PinExpiredError if the checkpoint, or the changes, are not retained any more, and StorageError if
    the store takes no pin, such as for want of the right to write.
    """

    def __init__(
        self,
        store: Store,
        query: QueryHistory,
        batch: int,
        *,
        operators: Collection[str] | None = None,
        owner: str,
        lasts_s: float | None,
        is_shared: bool = False,
        since: int | None = None,
        max_bytes: int | None = None,
        base: PinnedBase | None = None,
        branch: str = "",
        clock: Clock | None = None,
        new_token: Callable[[], bytes] = lambda: secrets.token_bytes(8),
    ) -> None:
        self._store = store
        self._clock = clock or SystemClock()
        self._new_token = new_token
        self._lasts_s = lasts_s
        now_ms = int(self._clock.now_s() * 1000)
        if max_bytes is None:
            made = Pin.of(query, batch, owner=owner, made_ms=now_ms, lasts_s=lasts_s, since=since, operators=operators)
            self._pin = replace(made, branch=branch)
        else:
            assert since is not None, "every consumer begins with some batch"
            assert operators is not None, "every consumer is one operator's"
            [identity] = operators
            self._pin = Pin.of_changes(
                query.histories[identity],
                batch,
                owner=owner,
                made_ms=now_ms,
                lasts_s=lasts_s,
                since=since,
                max_bytes=max_bytes,
                base=base,
            )
        self.name, self._made_s = self._write()
        try:
            self._require_hold(is_shared)
        except BaseException:
            self.release()
            raise

    def _require_hold(self, is_shared: bool) -> None:
        """See whether the pin that was written holds; a shared one says so then. PinExpiredError if it does not."""
        later = self._pin.with_later(self._read_retaining())
        if later != self._pin:
            # The query may have listed the pins after these batches and before the pin. Later lists have one of both.
            self._pin = later
            self._replace()
            self._read_retaining()
        if is_shared:
            self._pin = replace(self._pin, holds=True)
            self._replace()

    def _read_retaining(self) -> QueryHistory:
        """Read the log; PinExpiredError unless it, or another pin, keeps all that the pin names."""
        query = read_history(self._store)
        if not (_retains(query, self._pin) or self._another_stands()):
            raise gone(self._pin)
        return query

    def _replace(self) -> None:
        """Write the pin anew while it holds, and remove the former one."""
        former = self.name
        self.name, made_s = self._write()
        self._remove(former)
        self._require_time_left(self._made_s)  # it must have stood until the new one did
        self._made_s = made_s

    def _write(self) -> tuple[str, float]:
        """Store the pin under a new name; returns it, and a time before the pin's own."""
        name, before_s = pin_name(self._pin.batch, self._new_token()), self._clock.monotonic_s()
        try:
            write_pin(self._store, name, self._pin)
        except BaseException:
            self._remove(name)  # it may be there all the same
            raise
        return name, before_s

    def _require_time_left(self, made_s: float) -> None:
        """Raise PinExpiredError if a pin made at a time has expired by now."""
        passed_s = self._clock.monotonic_s() - made_s
        if self._lasts_s is not None and passed_s > self._lasts_s:
            raise PinExpiredError(
                f"The pin of checkpoint {self._pin.batch} of {_names(self._pin)} lasted {self._lasts_s:g} s, and the"
                f" reader has not asked for rows for {passed_s:.0f} s.",
                hint="Read the rows faster, or read from a savepoint.",
            )

    def _another_stands(self) -> bool:
        """Whether another pin, which holds, names the same objects."""
        found = holding_pins(self._store, self._clock.now_s())
        return any(other.covers(self._pin) for _, other in found)

    def keep(self) -> None:
        """Make the pin anew once half of its time is over; PinExpiredError if all of it is."""
        if self._lasts_s is None:
            return
        self._require_time_left(self._made_s)
        if self._clock.monotonic_s() - self._made_s > self._lasts_s / 2:
            self._replace()

    def release(self) -> None:
        """Remove the pin; if that fails, it expires."""
        self._remove(self.name)

    def _remove(self, name: str) -> None:
        with suppress(StorageError):
            self._store.delete([name])


def is_retained(store: Store, pin: Pin) -> bool:
    """Whether the log still retains the checkpoint that a pin names, or the changes if it is a consumer's."""
    return _retains(read_history(store), pin)


def _retains(query: QueryHistory, pin: Pin) -> bool:
    entry = query.at(pin.batch)
    if entry is None or entry.token != pin.token:
        return False
    is_whole = pin.max_bytes is None
    state_at = pin.batch if is_whole else pin.state_at if pin.operators[0].base_ranges else None
    if state_at is not None and query.retained_from > state_at:
        return False
    histories = [query.histories.get(one.identity) for one in pin.operators]
    return all(
        history is not None and (pin.since is None or history.changes_from <= pin.since) for history in histories
    )


def gone(pin: Pin) -> PinExpiredError:
    """The error of a checkpoint whose files may be gone."""
    return PinExpiredError(
        f"Checkpoint {pin.batch} of {_names(pin)} is not retained any more.",
        hint="Read a newer one, or retain more: Options(retained_checkpoints=...).",
    )


def _names(pin: Pin) -> str:
    return ", ".join(f"operator '{one.uid}'" for one in pin.operators)
