"""What happens in a story, for the message of a failure."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

_KEPT: Final = 80


class Difference(AssertionError):
    """Something is not as the model has it."""


class Journal:
    """Notes and counts the moves of a story.

    Attributes
    ----------
    moves : deque of str
        The last moves.
    counts : Counter of str
        How often each kind of move was made.
    """

    def __init__(self) -> None:
        self.moves: deque[str] = deque(maxlen=_KEPT)
        self.counts: Counter[str] = Counter()

    def note(self, text: str) -> None:
        """Note a move."""
        self.moves.append(text)

    def require(self, is_right: bool, text: str) -> None:
        """Raise Difference unless something is right."""
        if not is_right:
            raise Difference(text)
