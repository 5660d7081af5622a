"""Decides which samples stay: those of the newest batches."""

from __future__ import annotations

from statelog.checkpoint.batch import Batch
from statelog.checkpoint.history import History
from statelog.checkpoint.sample import sample_folder, sample_name, sample_names
from statelog.log.open import SAMPLES_FOLDER
from statelog.storage import ObjectInfo, Store


class KeptSamples:
    """The samples of an operator that a start keeps: those of the newest certain batches, and of the batch after them.

    `root` is the operator's folder, `batches` the number of certain batches.
    """

    def __init__(self, store: Store, root: str, batches: int) -> None:
        self._store = store
        self._root = root
        self._batches = batches
        # Replaced as a whole, so that the deleting thread sees either the old or the new state.
        self._names: dict[int, frozenset[str]] = {}

    def need(self, name: str) -> bool:
        """Whether a sample is kept."""
        return any(name in names for names in self._names.values())

    def open(self, history: History, first_batch: int) -> list[str]:
        """Take over the samples of earlier starts; returns those that may go.

        They may go at any age: earlier starts are fenced, and no checkpoint consists of samples.
        """
        listed = {info.name for info in self._store.list(f"{self._root}/{SAMPLES_FOLDER}/")}
        oldest = first_batch - self._batches
        checkpoints = [one for one in history.checkpoints if self._batches and one.batch >= oldest]
        self._names = {one.batch: frozenset(listed & sample_names(self._root, [one])) for one in checkpoints}
        return sorted(name for name in listed if not self.need(name))

    def certain(self, batch: Batch, epoch: int) -> list[str]:
        """A batch of this start is certain: returns the samples that may go now, whether they exist or not."""
        if not self._batches:
            return []
        assert batch.durable is not None
        own = {
            sample_name(sample_folder(self._root, epoch, subtask), batch.number, attempt)
            for attempt, subtask in batch.begun.items()
        }
        before = own.union(*self._names.values())
        kept = {number: names for number, names in self._names.items() if 0 < batch.number - number < self._batches}
        self._names = {**kept, batch.number: frozenset(sample_names(self._root, [batch.durable]))}
        return sorted(name for name in before if not self.need(name))


def unnamed_samples(store: Store, root: str, history: History) -> list[ObjectInfo]:
    """The samples whose attempt no checkpoint of the log names: those that nobody can replay."""
    named = sample_names(root, history.checkpoints)
    return [info for info in store.list(f"{root}/{SAMPLES_FOLDER}/") if info.name not in named]
