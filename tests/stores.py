"""Stores around others, for tests of several kinds."""

from statelog.storage import LocalStore
from statelog.storage.wrapper import StoreWrapper


class WholeObjects(StoreWrapper):
    """A store that cannot append, as object stores cannot."""

    @property
    def can_append(self) -> bool:
        return False


class KeptStore(WholeObjects):
    """The store of a location such as ``kept:/some/directory``, whose scheme only those know who have registered it."""

    def __init__(self, location: str) -> None:
        super().__init__(LocalStore(location.removeprefix("kept:")))
