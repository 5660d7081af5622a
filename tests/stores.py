"""Stores around others, for tests of several kinds."""

from statelog.storage.wrapper import StoreWrapper


class WholeObjects(StoreWrapper):
    """A store that cannot append, as object stores cannot."""

    @property
    def can_append(self) -> bool:
        return False
