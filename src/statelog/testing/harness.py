"""The harness: runs a processor in plain Python, batch by batch, with crashes, restarts and rescaling on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from weakref import finalize

from pyspark.sql.types import StructType

from statelog.coordinator.batch import BatchTime
from statelog.errors import ConfigurationError
from statelog.metrics import Step
from statelog.numbers import checked_whole
from statelog.operators.unkeyed.processor import OperatorProcessor
from statelog.options import Options
from statelog.runs.key_groups import KEY_GROUPS
from statelog.runs.times import NO_TIME_MS, Watermark
from statelog.storage import LocalStore, Store
from statelog.testing.faults import FaultPlan, FaultStore
from statelog.testing.keyed import KeyedQuery
from statelog.testing.query import DriverDeath, LocalQuery, MicroBatches, Snapshot, discard, new_directory
from statelog.testing.rows import OperatorArguments
from statelog.testing.state_view import StateView
from statelog.testing.unkeyed import UnkeyedQuery

_T = TypeVar("_T")
_Rows = list[Any]  # the class has a method named list


@dataclass(frozen=True)
class HarnessSnapshot:
    """A copy of a query without its processes, made by :meth:`Harness.snapshot` for :meth:`Harness.restore`."""

    query: Snapshot
    arguments: OperatorArguments
    options: Options


@dataclass(frozen=True)
class HarnessParts:
    """The parts of a harness, for statelog's own tests."""

    description: KeyedQuery | UnkeyedQuery
    """The operator as the test describes it."""
    query: LocalQuery
    batches: MicroBatches

    @property
    def view(self) -> StateView:
        """The state of a keyed operator; raises ConfigurationError if the operator is unkeyed."""
        if not isinstance(self.description, KeyedQuery):
            raise ConfigurationError("The operator has no keys.", hint="Use operatorState for its states.")
        return self.description.view(self.batches)


def parts_of(harness: Harness) -> HarnessParts:
    """The current parts of a harness; a restart may replace the description."""
    return HarnessParts(harness._description, harness._query, harness._batches)


class Harness:
    """A query with one stateful operator, without Spark: no session, no JVM, no files of your own.

    It runs the same code as a query on Spark: the processor is pickled and called in the same order, rows reach
    subtasks by the same hash of their keys (Spark's ``xxhash64``), and state passes through the same changesets, log
    and tables, in a temporary directory that :meth:`close` removes. Create a harness, call :meth:`push` and the other
    methods as needed, and finally call :meth:`close` or leave the ``with`` block.

    Parameters
    ----------
    processor : StatefulProcessor or OperatorProcessor
        A processor as ``transformWithState`` or ``statelog.process`` takes it.
    input, output : StructType or str
        Columns of the input and of the output.
    keys : list of str
        The grouping columns; for an OperatorProcessor, omit this and the following arguments up to `keyHash`.
    timeMode : {"None", "ProcessingTime", "EventTime"}
        As for ``transformWithState``.
    pandas : bool
        Whether the processor takes and returns pandas frames.
    initialState : tuple of (StructType or str, list of rows), optional
        Columns and rows of an initial state, keyed by columns of the same names.
    eventTime : str, optional
        The column that ``withWatermark`` would name in a query. It determines which rows are late;
        :meth:`advanceWatermark` sets the watermark.
    eventTimeColumnName : str
        The output column that a later operator takes as event time.
    watermark : Watermark, optional
        The operator's own watermark, computed from its rows.
    keyHash : callable, optional
        The hash of a key (a tuple) as a 64-bit number; a hash with few values makes keys collide.
    broadcast : StructType or str, optional
        Columns of the broadcast input of an OperatorProcessor.
    parallelism : int
        Number of subtasks.
    options : Options, optional
        The operator's options, for example its table.
    storeFaults : float or FaultPlan
        Share of the store's calls that fail, chosen by `seed`, or your own plan. A task that fails because of it is
        attempted up to four times, as in Spark.
    seed : int
        Seed of the random faults.
    sessionTimeZone : str
        Spark's session time zone.
    uid : str, optional
        The operator's name.

    Raises
    ------
    ConfigurationError, ProcessorError
        As ``transformWithState``.

    Examples
    --------
    >>> with Harness(Count(), input="user string", keys=["user"], output="user string, n long") as harness:
    ...     harness.push([("ann",), ("ann",), ("bob",)])  # doctest: +SKIP
    [Row(user='ann', n=2), Row(user='bob', n=1)]
    """

    def __init__(
        self,
        processor: Any,
        *,
        input: StructType | str,
        output: StructType | str,
        keys: Sequence[str] = (),
        timeMode: str = "None",
        pandas: bool = False,
        initialState: tuple[StructType | str, Sequence[Any]] | None = None,
        eventTime: str | None = None,
        eventTimeColumnName: str = "",
        watermark: Watermark | None = None,
        keyHash: Callable[[tuple[Any, ...]], int] | None = None,
        broadcast: StructType | str | None = None,
        parallelism: int = 2,
        options: Options | None = None,
        storeFaults: float | FaultPlan = 0.0,
        seed: int = 0,
        sessionTimeZone: str = "UTC",
        uid: str | None = None,
    ) -> None:
        arguments = OperatorArguments(
            input=input,
            keys=keys,
            output=output,
            timeMode=timeMode,
            pandas=pandas,
            initialState=initialState,
            eventTime=eventTime,
            eventTimeColumnName=eventTimeColumnName,
            watermark=watermark,
            keyHash=keyHash,
            broadcast=broadcast,
            sessionTimeZone=sessionTimeZone,
            uid=uid,
        )
        self._open(processor, arguments, _checked(parallelism), options or Options(), _fault_plan(storeFaults, seed))

    def _open(
        self, processor: Any, arguments: OperatorArguments, parallelism: int, options: Options, faults: FaultPlan | None
    ) -> None:
        self._arguments = arguments
        self._options = options
        self._description = _described(processor, arguments, options)
        directory = new_directory()
        self._query = LocalQuery(self._description.operator, directory, options, open_store=_store_opener(faults))
        self._discard = finalize(self, discard, directory, self._query.stores)
        self._batches = MicroBatches(self._query, parallelism)
        self._last_output: _Rows = []

    # ---- Batches ----

    def push(self, rows: Sequence[Any], processingTimeMs: int | None = None, *, broadcast: Sequence[Any] = ()) -> _Rows:
        """Run a micro-batch.

        Parameters
        ----------
        rows : list of tuple, dict or Row
            Its rows, in order; tuples are matched by position. There may be none.
        processingTimeMs : int, optional
            The batch's processing time; by default the time of the previous batch, or 0 for the first.
        broadcast : list of tuple, dict or Row
            The rows of the broadcast input.

        Returns
        -------
        list of Row
            The output, subtask by subtask.

        Raises
        ------
        ProcessorError
            If the processor fails. This ends the query; the next batch starts from the previous checkpoint.
        ConfigurationError
            If rows do not fit the input, or time goes backward.
        """
        before = self._batches.last_time
        time_ms = before.time_ms if processingTimeMs is None else processingTimeMs
        return self._run(rows, self._at(time_ms, before.watermark_ms), broadcast)

    def advanceProcessingTime(self, timeMs: int) -> _Rows:
        """Run a batch without rows at a later processing time, so that timers fire, and return its output.

        Parameters
        ----------
        timeMs : int
            The new time, not a difference; milliseconds since the Unix epoch.
        """
        return self.push([], timeMs)

    def advanceWatermark(self, timeMs: int) -> _Rows:
        """Run a batch without rows at a later watermark, so that timers fire, and return its output.

        Parameters
        ----------
        timeMs : int
            The new watermark, milliseconds since the Unix epoch. Rows up to it are late from the next batch on.
        """
        if self._arguments.watermark is not None:
            raise ConfigurationError(
                "advanceWatermark: the operator has its own watermark, which is computed from the rows.",
                hint="Push a row with a later time. The next batch, such as push([]), has the new watermark.",
            )
        before = self._batches.last_time
        if timeMs < before.watermark_ms:
            raise ConfigurationError(f"advanceWatermark: the watermark is {before.watermark_ms} and cannot go back.")
        return self._run([], self._at(before.time_ms, timeMs))

    def repeatBatch(self, *, restart: bool = False) -> _Rows:
        """Run the last batch again, as Spark may, and return its output.

        Parameters
        ----------
        restart : bool
            Whether a new start repeats the batch, as if the driver died before Spark's commit. Otherwise later
            attempts of the same start do.

        Raises
        ------
        AssertionError
            If the output differs: the processor is not deterministic.
        """
        self._require_open()
        output = self._description.output(self._batches.repeat(in_new_run=restart))
        expected, found = (Counter(map(repr, rows)) for rows in (self._last_output, output))
        if found != expected:
            only_before, only_now = list((expected - found).elements()), list((found - expected).elements())
            raise AssertionError(
                f"Batch {self.batchId} returned other rows when it was repeated. Only the first time: {only_before};"
                f" only now: {only_now}. A processor must depend only on its rows, state and times."
            )
        self._last_output = output
        return output

    def _at(self, time_ms: int, watermark_ms: int) -> BatchTime:
        before = self._batches.last_time
        if isinstance(time_ms, bool) or not isinstance(time_ms, int) or time_ms < before.time_ms:
            raise ConfigurationError(
                f"The processing time is {before.time_ms} ms and cannot become {time_ms!r}.",
                hint="Pass a whole number of milliseconds that is not smaller.",
            )
        return BatchTime(time_ms, watermark_ms, before.watermark_ms)

    def _run(self, rows: Sequence[Any], time: BatchTime, broadcast: Sequence[Any] = ()) -> _Rows:
        self._require_open()
        data = self._description.data(rows, broadcast)
        self._last_output = self._description.output(self._batches.run(data, time))
        return self._last_output

    # ---- Crashes and restarts ----

    def crash(
        self,
        step: Step,
        subtask: int | None = None,
        *,
        driver: bool = False,
        parallelism: int | None = None,
        keepLocal: bool = True,
    ) -> None:
        """Kill the next process that passes a step, at that step.

        If it is a task, another worker repeats it. If it is the driver, at ``LAST_ACK`` or ``DURABLE``, a new start
        repeats the batch. In both cases, the method that runs the batch returns the output that Spark would keep.

        Parameters
        ----------
        step : Step
            The step. Tasks pass ``MERGING`` only when there are runs to merge, so a crash there may come later.
        subtask : int, optional
            The subtask whose task dies; by default the first that passes the step.
        driver : bool
            Whether the driver also dies at a task's step.
        parallelism : int, optional
            Number of subtasks of the start that follows the driver's death.
        keepLocal : bool
            Whether this start finds the local files of the host.
        """
        self._require_open()
        if not isinstance(step, Step):
            raise ConfigurationError(f"crash: {step!r} is not a step.", hint="Use a member of statelog.Step.")
        if subtask is not None and step in (Step.LAST_ACK, Step.DURABLE):
            raise ConfigurationError(
                f"crash: '{step}' is a step of the driver, and of no subtask.", hint="Leave out subtask."
            )
        chosen = None if parallelism is None else _checked(parallelism)
        self._batches.death = DriverDeath(driver, chosen, keepLocal)
        self._query.crash_point.arm(step, subtask)

    @property
    def crashes(self) -> int:
        """Number of crashes so far."""
        return self._query.crash_point.crashes

    def restart(self, parallelism: int | None = None, *, keepLocal: bool = True, processor: Any = None) -> None:
        """Stop the query and start it again.

        Parameters
        ----------
        parallelism : int, optional
            The new number of subtasks.
        keepLocal : bool
            Whether the query starts on the same host, which has local files of its state.
        processor : StatefulProcessor, optional
            Another version of the processor.
        """
        self._require_open()
        if processor is not None:
            self._description = _described(processor, self._arguments, self._options)
            self._query.operator = self._description.operator
        self._batches.restart(None if parallelism is None else _checked(parallelism), keep_local=keepLocal)

    def snapshot(self) -> HarnessSnapshot:
        """Copy what would remain of the query without its processes, for :meth:`restore`."""
        self._require_open()
        return HarnessSnapshot(self._batches.snapshot(), self._arguments, self._options)

    @classmethod
    def restore(cls, snapshot: HarnessSnapshot, processor: Any, *, parallelism: int | None = None) -> Harness:
        """Create a harness that continues from a snapshot, on a new host; the original harness is not changed.

        Parameters
        ----------
        snapshot : HarnessSnapshot
            The result of :meth:`snapshot`.
        processor : StatefulProcessor
            The processor, or another version of it.
        parallelism : int, optional
            Number of subtasks, by default that of the snapshot.
        """
        restored = cls.__new__(cls)
        chosen = snapshot.query.parallelism if parallelism is None else _checked(parallelism)
        restored._open(processor, snapshot.arguments, chosen, snapshot.options, None)
        restored._batches.load(snapshot.query)
        return restored

    # ---- State and measurements ----

    def value(self, name: str, key: Any) -> tuple[Any, ...] | None:
        """The value of a key in a value or reducing state, or its accumulator in an aggregating state.

        Like the other methods that read state, this reads the newest checkpoint through log and table, as a new host
        would.

        Parameters
        ----------
        name : str
            The state.
        key : tuple or other value
            The key; a single value stands for a tuple with that value.

        Returns
        -------
        tuple or None
            None if the key has no value.
        """
        return self._view.value(name, key)

    def list(self, name: str, key: Any) -> _Rows:
        """The elements of a key in a list state; parameters as for :meth:`value`."""
        return self._view.elements(name, key)

    def map(self, name: str, key: Any) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """The entries of a key in a map state; parameters as for :meth:`value`."""
        return self._view.entries(name, key)

    def timers(self, key: Any) -> _Rows:
        """The times of a key's timers, in order."""
        return self._view.timers(key)

    def operatorState(self, name: str) -> Any:
        """A state of an OperatorProcessor: the elements of each subtask, or the map of a broadcast state."""
        self._require_open()
        if not isinstance(self._description, UnkeyedQuery):
            raise ConfigurationError(
                "operatorState: the operator is keyed.", hint="Use value, list and map, which take a key."
            )
        return self._description.state(name, self._batches.history(), self._query.location)

    @property
    def _view(self) -> StateView:
        self._require_open()
        return parts_of(self).view

    @property
    def batchId(self) -> int:
        """Number of the last batch; -1 before the first."""
        return self._batches.next_batch - 1

    @property
    def parallelism(self) -> int:
        """Number of subtasks."""
        return self._batches.parallelism

    @property
    def processingTimeMs(self) -> int:
        """Processing time of the last batch."""
        return self._batches.last_time.time_ms

    @property
    def watermarkMs(self) -> int:
        """Watermark of the last batch; until the second batch, an operator's own watermark is before all times."""
        if self._arguments.watermark is None:
            return self._batches.last_time.watermark_ms
        latest = self._batches.history().latest
        return NO_TIME_MS if latest is None else latest.watermark_ms

    @property
    def checkpoints(self) -> _Rows:
        """The :class:`statelog.CheckpointMetrics` of all checkpoints, for example late rows, changes and bytes."""
        return self._query.crash_point.checkpoints

    # ---- The end ----

    def close(self) -> None:
        """End the query and remove its files."""
        if self._discard.alive:
            try:
                self._batches.stop()
            finally:
                self._discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._discard.alive:
            raise ConfigurationError("The harness is closed.", hint="Create another one.")


def _described(processor: Any, arguments: OperatorArguments, options: Options) -> KeyedQuery | UnkeyedQuery:
    if not isinstance(processor, OperatorProcessor):
        if arguments.broadcast is not None:
            raise ConfigurationError("Harness: a keyed operator has no broadcast input.")
        return KeyedQuery(processor, arguments, options)
    of_both = OperatorArguments(
        input=arguments.input,
        output=arguments.output,
        broadcast=arguments.broadcast,
        sessionTimeZone=arguments.sessionTimeZone,
        uid=arguments.uid,
    )
    if arguments != of_both:
        raise ConfigurationError(
            "Harness: an OperatorProcessor has no keys, times, initial state or pandas frames.",
            hint="Pass only input, output, broadcast, parallelism, options and uid.",
        )
    return UnkeyedQuery(processor, arguments, options)


def _checked(parallelism: int) -> int:
    return checked_whole(parallelism, "parallelism", 1, KEY_GROUPS)


def _fault_plan(faults: float | FaultPlan, seed: int) -> FaultPlan | None:
    if isinstance(faults, FaultPlan):
        return faults
    if not 0 <= faults < 1:
        raise ConfigurationError(f"storeFaults is {faults!r}.", hint="It must be a share below 1, or a FaultPlan.")
    return FaultPlan.seeded(seed, rate=faults) if faults else None


def _store_opener(faults: FaultPlan | None) -> Callable[[str], Store]:
    return LocalStore if faults is None else lambda location: FaultStore(LocalStore(location), faults)
