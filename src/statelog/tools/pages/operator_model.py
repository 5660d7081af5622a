"""The numbers that the page shows of one operator."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from statelog.clock import SystemClock
from statelog.errors import ConfigurationError, CorruptionError, StorageError
from statelog.history.footprint import stored_parts
from statelog.history.operator_history import History, Record
from statelog.history.pins import Pin, has_expired, read_pin
from statelog.history.query_history import QueryHistory
from statelog.local.policy import MERGE_POLICY
from statelog.log.entry import Claim, Entry, Fence, Frame, FrameReader
from statelog.log.numbered import LOG_FILE
from statelog.log.open import LOG_FOLDER, PINS_FOLDER, open_log
from statelog.metrics import CheckpointMetrics, storage_overhead
from statelog.options import Options
from statelog.reading.checkpoints import LoggedPoint, StoredQuery
from statelog.reading.pins import PinInfo, pin_info
from statelog.reading.states import shown_name
from statelog.runs import digests
from statelog.runs.schema import decode_schema
from statelog.runs.times import NO_TIME_MS
from statelog.storage import ObjectInfo, Store
from statelog.storage.links import is_link
from statelog.tools.pages.checkpoint_sizes import CheckpointSizes, measure_checkpoints
from statelog.tools.pages.live import LiveOperator

RECENT = 100
"""Checkpoints over which the work of the subtasks is added up."""


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint in the log."""

    batch: int
    time_ms: int
    interval_ms: int | None
    """Since the batch before."""
    epoch: int
    revision: int
    parallelism: int
    watermark_ms: int | None
    input_rows: int
    changes: int
    changed_bytes: int
    largest_changed_bytes: int
    """Those of the subtask with the most."""
    materialized: int
    """Subtasks whose materialized state counts from this checkpoint on."""
    materialized_bytes: int
    is_retained: bool
    pinned_by: tuple[str, ...]
    sizes: CheckpointSizes


@dataclass(frozen=True)
class SubtaskRow:
    """A subtask in the newest checkpoint."""

    subtask: int
    state_bytes: int
    """What a restart of it reads."""
    input_rows: int
    """Of the recent batches, as the changed bytes."""
    changed_bytes: int


@dataclass(frozen=True)
class Restart:
    """What a restart reads, and how long it takes by estimate."""

    batch: int
    base_bytes: int
    log_bytes: int
    files: int
    checkpoints: int
    """Checkpoints whose changes are read."""
    largest_subtask: int
    largest_bytes: int
    seconds: float
    """For the largest subtask, at the speed that materialization assumes."""


@dataclass(frozen=True)
class FolderSize:
    """The objects of one kind."""

    folder: str
    objects: int
    size_bytes: int


@dataclass(frozen=True)
class OperatorModel:
    """An operator. Rows are in order of batches, the oldest first."""

    uid: str
    location: str
    query_id: str
    key: str
    states: tuple[str, ...]
    problems: tuple[str, ...]
    checkpoints: tuple[CheckpointRow, ...]
    """At least one."""
    starts: tuple[Claim, ...]
    subtasks: tuple[SubtaskRow, ...]
    restart: Restart | None
    pins: tuple[PinInfo, ...]
    folders: tuple[FolderSize, ...]
    live: LiveOperator | None = None
    """What a running query's driver knows."""

    @property
    def metrics(self) -> Sequence[CheckpointMetrics]:
        """Of a running query's driver, the latest ones."""
        return () if self.live is None else self.live.metrics

    @property
    def newest(self) -> CheckpointRow:
        """The newest checkpoint."""
        return self.checkpoints[-1]

    @property
    def stored_bytes(self) -> int:
        """All objects below the operator's folder, with the log and the pins."""
        return sum(folder.size_bytes for folder in self.folders)

    @property
    def storage_overhead(self) -> float | None:
        """Stored bytes per byte of the newest checkpoint's state."""
        return storage_overhead(self.stored_bytes, self.newest.sizes.state_bytes or 0)

    @property
    def recent(self) -> int:
        """Checkpoints over which the subtasks' work is added up."""
        return min(RECENT, len(self.checkpoints))


@dataclass(frozen=True)
class ReadQuery:
    """What is stored of a query."""

    operators: tuple[OperatorModel, ...]
    """Those of the newest checkpoint, in order of their names."""
    problems: tuple[str, ...]
    """Damages of the log and of pins, which each operator also has."""


def read_operators(store: Store, location: str, now_s: float) -> ReadQuery:
    """Read the log, the pins and the listing of a query; raises StorageError if the store fails."""
    log = read_log(store)
    query = StoredQuery(store, location, QueryHistory(log.entries))
    objects = {info.name: info for info in store.list()}
    problems = [*log.problems]
    pins = _read_pins(store, objects.values(), now_s, problems)
    operators = [
        _operator(query, identity, log, objects, [one for one in pins if one[1].operator(identity)], problems)
        for identity in query.identities(None)
    ]
    return ReadQuery(tuple(operators), tuple(problems))


def _operator(
    query: StoredQuery,
    identity: str,
    log: ReadLog,
    objects: Mapping[str, ObjectInfo],
    pins: Sequence[tuple[ObjectInfo, Pin]],
    problems: Sequence[str],
) -> OperatorModel:
    history = query.history.histories[identity]
    latest = history.latest
    assert latest is not None, "an operator has a checkpoint"
    own = [*problems]
    newest = None if log.problems else query.retained(identity, latest.batch)
    if not log.problems and history.first_missing is not None:
        own.append(f"The log lacks the checkpoint of batch {history.first_missing}.")
    own += [] if newest is None else _missing_objects(newest, objects)
    records = list(history.records)
    rows = _rows(history, records, pins, is_whole_log=not log.problems)
    subtasks = () if newest is None else _subtasks(history, records)
    return OperatorModel(
        uid=latest.uid,
        location=query.location,
        query_id=latest.query_id,
        key="" if latest.is_whole else _key_text(latest.key_schema),
        states=tuple(sorted(shown_name(stored) for stored in latest.states)),
        problems=tuple(own),
        checkpoints=rows,
        starts=tuple(log.claims),
        subtasks=subtasks,
        restart=None if newest is None else _restart(records[-1], rows[-1].sizes, subtasks),
        pins=tuple(pin_info(info, pin, query) for info, pin in pins),
        folders=_folders(identity, objects.values()),
    )


def _read_pins(
    store: Store, objects: Iterable[ObjectInfo], now_s: float, problems: list[str]
) -> list[tuple[ObjectInfo, Pin]]:
    """The pins that have not expired; the damaged ones are problems."""
    found: list[tuple[ObjectInfo, Pin]] = []
    for info in objects:
        if not info.name.startswith(f"{PINS_FOLDER}/"):
            continue
        try:
            pin = read_pin(store, info.name)
        except (CorruptionError, ConfigurationError) as error:
            problems.append(error.message)
            continue
        if pin is not None and not has_expired(pin, info, now_s, 0.0):
            found.append((info, pin))
    return sorted(found, key=lambda one: (one[1].batch, one[0].name))


def _missing_objects(newest: LoggedPoint, objects: Mapping[str, ObjectInfo]) -> list[str]:
    """Objects that the newest checkpoint names and that are not there, or too short."""
    batch = newest.batch
    ends: dict[str, int] = dict.fromkeys(newest.needs().objects, 0)
    for part in stored_parts(newest.history, batch):
        ends[part.name] = max(ends.get(part.name, 0), part.offset + part.length)
    found: list[str] = []
    for name, end in sorted(ends.items()):
        if is_link(name):
            continue
        if name not in objects:
            found.append(f"{name}: the object is gone; checkpoint {batch} needs it.")
        elif objects[name].size_bytes < end:
            found.append(
                f"{name}: it has {objects[name].size_bytes:,} bytes; checkpoint {batch} needs {end:,} of them."
            )
    return found


def _rows(
    history: History,
    records: Sequence[Record],
    pins: Sequence[tuple[ObjectInfo, Pin]],
    *,
    is_whole_log: bool,
) -> tuple[CheckpointRow, ...]:
    owners: dict[bytes, list[str]] = defaultdict(list)
    for _, pin in pins:
        owners[pin.token].append(pin.owner)
    is_complete = is_whole_log and history.first_missing is None
    retained_from = history.oldest.batch if is_complete and history.oldest is not None else None
    rows: list[CheckpointRow] = []
    before_ms: int | None = None
    for record, sizes in zip(records, measure_checkpoints(records), strict=True):
        one = record.checkpoint
        changed = Counter[int]()
        for segment in one.segments:
            changed[segment.subtask] += segment.length
        rows.append(
            CheckpointRow(
                batch=one.batch,
                time_ms=one.batch_time_ms,
                interval_ms=None if before_ms is None else one.batch_time_ms - before_ms,
                epoch=one.epoch,
                revision=one.revision,
                parallelism=one.parallelism,
                watermark_ms=None if one.watermark_ms == NO_TIME_MS else one.watermark_ms,
                input_rows=sum(segment.input_rows for segment in one.segments),
                changes=sum(segment.rows for segment in one.segments),
                changed_bytes=sum(changed.values()),
                largest_changed_bytes=max(changed.values(), default=0),
                materialized=len(one.bases),
                materialized_bytes=sum(base.levels[-1].length for base in one.bases),
                is_retained=retained_from is not None and one.batch >= retained_from,
                pinned_by=tuple(owners.get(one.token, ())),
                sizes=sizes if is_whole_log else CheckpointSizes(None, None, None, None),
            )
        )
        before_ms = one.batch_time_ms
    return tuple(rows)


def _subtasks(history: History, records: Sequence[Record]) -> tuple[SubtaskRow, ...]:
    newest = records[-1].checkpoint
    input_rows, changed = Counter[int](), Counter[int]()
    for record in records[-RECENT:]:
        if record.checkpoint.parallelism == newest.parallelism:
            for segment in record.checkpoint.segments:
                input_rows[segment.subtask] += segment.input_rows
                changed[segment.subtask] += segment.length
    rows: list[SubtaskRow] = []
    for subtask in range(newest.parallelism):
        if newest.is_whole:
            state_bytes = sum(segment.length for segment in newest.segments_of(subtask, subtask))
        else:
            genesis = digests.genesis(newest.identity, subtask, newest.parallelism)
            state_bytes = history.missing_segments(genesis, subtask, newest.parallelism, newest.batch, set()).length
        rows.append(SubtaskRow(subtask, state_bytes, input_rows[subtask], changed[subtask]))
    return tuple(rows)


def _restart(newest: Record, sizes: CheckpointSizes, subtasks: Sequence[SubtaskRow]) -> Restart | None:
    if sizes.base_bytes is None or sizes.log_bytes is None or sizes.files is None:
        return None
    largest = max(subtasks, key=lambda one: one.state_bytes)
    checkpoints = newest.batch - newest.needed_from + 1
    return Restart(
        batch=newest.batch,
        base_bytes=sizes.base_bytes,
        log_bytes=sizes.log_bytes,
        files=sizes.files,
        checkpoints=checkpoints,
        largest_subtask=largest.subtask,
        largest_bytes=largest.state_bytes,
        seconds=largest.state_bytes / MERGE_POLICY.replay_bytes_per_s + checkpoints * MERGE_POLICY.replay_checkpoint_s,
    )


def _folders(identity: str, objects: Iterable[ObjectInfo]) -> tuple[FolderSize, ...]:
    """The objects of an operator, with the log and the pins of its query."""
    counts, sizes = Counter[str](), Counter[str]()
    for info in objects:
        place, _, rest = info.name.partition("/")
        folder = rest.partition("/")[0] if place == identity else place
        if place == identity or place in (LOG_FOLDER, PINS_FOLDER):
            counts[folder] += 1
            sizes[folder] += info.size_bytes
    return tuple(FolderSize(folder, counts[folder], sizes[folder]) for folder in sorted(counts))


def _key_text(key_schema: bytes) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in decode_schema(key_schema))


# ---- The entries of a log: of a damaged one, all that can still be read ----


@dataclass(frozen=True)
class ReadLog:
    """The entries of a log."""

    entries: list[Entry]
    problems: tuple[str, ...]
    """What is wrong with it; if there is something, the entries are those that could be read."""

    @property
    def claims(self) -> list[Claim]:
        """The starts of the query that are in the log."""
        return [entry for entry in self.entries if isinstance(entry, Claim)]


def read_log(store: Store) -> ReadLog:
    """Read the log of a location; raises StorageError if the store fails."""
    try:
        return ReadLog(open_log(store, Options(), SystemClock()).read(), ())
    except (CorruptionError, ConfigurationError) as error:
        entries, problems = _salvage(store, store.list(f"{LOG_FOLDER}/"))
        told = error.message
        return ReadLog(entries, (told, *[problem for problem in problems if problem != told]))


def _salvage(store: Store, infos: Sequence[ObjectInfo]) -> tuple[list[Entry], list[str]]:
    """The entries of each log file up to its first damage, and the damages."""
    found: list[tuple[str, Frame]] = []
    problems: list[str] = []
    for info in infos:
        name = info.name.rpartition("/")[2]
        match = LOG_FILE.fullmatch(name)
        if match is None:
            continue
        reader = FrameReader(store, info.name, int(match[1]))
        end = 0
        try:
            while frame := reader.frame_at(end, info.size_bytes):
                found.append((name, frame))
                end = frame.end
        except (CorruptionError, ConfigurationError, StorageError) as error:
            problems.append(error.message)
    ends = {
        name: end
        for _, frame in reversed(found)
        if isinstance(frame.entry, Fence)
        for name, end in frame.entry.ends.items()
    }
    entries: list[Entry] = [
        frame.entry
        for name, frame in found
        if not isinstance(frame.entry, Fence) and frame.end <= ends.get(name, frame.end)
    ]
    return entries, problems
