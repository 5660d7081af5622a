"""Materializes a subtask's state in slices: merges its local runs, and stores the runs that the store lacks.

A job continues from slice to slice, in whichever process of the host has the subtask's task. Its progress is saved in a
folder next to the local runs; a job that is lost starts over.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from statelog.errors import CorruptionError, ErrorKind, StatelogError
from statelog.files import removed_on_failure, write_file
from statelog.local.runs import JOB_FOLDER, LocalRun, LocalRuns
from statelog.log.references import Level, StoredRun
from statelog.log_fields import get_logger
from statelog.runs import digests
from statelog.runs.key_groups import HashRange
from statelog.runs.merge import Garbage, MergePosition, RunMerge, merge_runs
from statelog.runs.schema import Footer
from statelog.runs.writer import STORED_BLOCK_BYTES, STORED_BLOCK_ROWS, RunWriter
from statelog.sealed import seal, unseal
from statelog.storage import Store
from statelog.storage.names import is_plain

_log = get_logger(__name__)

_STATE: Final = "job.json"
_KIND: Final = "materialization job"
_VERSION: Final = 1
_INLINE: Final = "inline.run"


class Grant(msgspec.Struct, frozen=True):
    """The coordinator's permission to materialize a subtask's state once, beginning with one base."""

    job: str
    """Name of the job, unique in the start."""
    base: bytes
    """Chain digest of the materialized state that the job begins with."""
    known: list[Level]
    """The levels of that state that the job may build on; they stay in the store until the grant ends."""
    folder: str
    """The job writes its objects below this folder, and nowhere else."""


class MaintenanceRequest(msgspec.Struct, frozen=True):
    """The coordinator's request that a subtask merges or materializes its state after a batch."""

    slice_s: float
    """How long a slice may take; it ends with the step that exceeds this."""
    inline_bytes: int
    """A new run up to this size travels with the next ack, and is not stored as an object."""
    grant: Grant | None
    """The grant to materialize; None to only merge local runs."""
    is_due: bool
    """Whether to materialize even a state that has not changed; counts only without a changelog."""


@dataclass(frozen=True)
class Materialized:
    """The outcome of a job."""

    levels: list[Level]
    """The materialized state; empty if the job failed."""
    job: str
    """The name of the job, as in its grant."""
    payload: bytes = b""
    """The bytes of the runs without a name."""
    failure: str = ""
    """Why the job failed; empty if it did not fail."""


class _Merging(msgspec.Struct, frozen=True):
    """Progress of the merge of the inputs; without inputs nothing is left to merge."""

    inputs: list[str]
    position: MergePosition | None = None
    written: Footer | None = None
    size_bytes: int = 0


class _Job(msgspec.Struct, frozen=True, kw_only=True):
    """A job between two slices; a job that only merges has no grant.

    All of its slices leave out the same garbage: a start may go back to the state after the result's last batch, which
    still needs entries that have expired since then.
    """

    run_id: str
    target: str = ""
    """File name of the local run that the merge makes, or that is stored; empty if nothing is left to do."""
    merging: _Merging = _Merging([])
    garbage: Garbage
    grant: str = ""
    levels: list[Level] = []
    """The levels before the one that the job adds; once the job is done, also the added one."""
    prefix: str = ""
    """Prefix of the names of the runs that the job stores."""
    runs: list[StoredRun] = []
    next_hash: int | None = None
    """The first key hash that is not stored yet; None if none is."""
    is_done: bool = False
    failure: str = ""

    def require_sound(self, name: str) -> None:
        """Raise CorruptionError unless the job reads and makes only local runs; `name` is its file."""
        names = {*self.merging.inputs, self.target} - {""}
        is_over = self.is_done and bool(self.grant)
        if any(LocalRun.parse(one) is None for one in names) or (is_over and not self.levels):
            raise CorruptionError(f"{name}: it is not a job of these local runs.", kind=ErrorKind.FORMAT)


@dataclass(kw_only=True)
class Materializer:
    """Merges one subtask's local runs, and materializes its state."""

    local: LocalRuns
    within: HashRange
    genesis: bytes
    """Digest of the empty state."""
    run_id: str
    """The start of the query. Jobs of others are void: their stored runs may be gone, or be in a replaced location."""
    compression: str | None
    garbage: Garbage
    """Jobs that begin now leave it out."""
    max_space_amplification: float
    """A state with more rows than this many times those that are not garbage is materialized as a whole."""
    open_store: Callable[[], Store]
    monotonic_s: Callable[[], float]
    token: str
    """Unique among all attempts."""
    note_stored: Callable[[], None] = lambda: None
    """Called after each object that it has stored."""

    def __post_init__(self) -> None:
        self._folder = self.local.directory / JOB_FOLDER

    # ---- Progress of a job ----

    def result(self, grant: Grant | None) -> Materialized | None:
        """The outcome of a grant's job, if it is over; a job of another grant is void."""
        job = self._load()
        if grant is None or job is None or job.grant != grant.job or not (job.is_done or job.failure):
            return None
        if job.failure:
            return Materialized([], job.grant, failure=job.failure)
        payload = self._inline(job)
        if payload is None:
            self.discard()  # it starts over
            return None
        return Materialized(job.levels, job.grant, payload)

    def _inline(self, job: _Job) -> bytes | None:
        """The bytes of the job's run without a name; empty if it has none, None if they are lost or damaged."""
        wanted = [run for run in job.levels[-1].runs if not run.name]
        if not wanted:
            return b""
        try:
            data = (self._folder / _INLINE).read_bytes()
        except FileNotFoundError:
            return None
        return data if digests.checksum(data) == wanted[0].checksum else None

    def discard(self) -> None:
        """Forget the job, which is over or void."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def end(self, job: str) -> None:
        """Forget a job whose grant has ended, unless another one has begun since."""
        with self._locked() as is_mine:
            found = self._load()
            if is_mine and found is not None and found.grant == job:
                self.discard()

    def inputs(self) -> set[str]:
        """File names of the local runs that the job reads."""
        job = self._load()
        return set() if job is None or job.is_done else {*job.merging.inputs, job.target}

    @property
    def is_merging(self) -> bool:
        """Whether a merge of local runs, without storing, is in progress."""
        job = self._load()
        return job is not None and not job.grant

    # ---- Slices ----

    def work(self, request: MaintenanceRequest, chain: Sequence[LocalRun], merges: Sequence[LocalRun]) -> None:
        """Do one slice.

        `chain` is the chain of a state that is certain, oldest first. `merges` are adjacent runs of it that must be
        merged in any case; if there are any, a new job does that first.
        """
        end_s = self.monotonic_s() + request.slice_s
        with self._locked() as is_mine:
            if not is_mine:
                return  # another attempt works on it
            job = self._load()
            granted = request.grant.job if request.grant else ""
            is_void = job is not None and job.grant not in ("", granted)
            if job is not None and not is_void and (job.is_done or job.failure):
                return  # its outcome goes with the next ack
            try:
                if job is None or is_void or not self._fits(job, request, chain):
                    job = self._begin(request, chain, merges)
                while job is not None and not job.is_done and self.monotonic_s() < end_s:
                    job = self._step(job, request, end_s)
            except (StatelogError, OSError, pa.ArrowInvalid) as error:
                self._fail(request, f"{type(error).__name__}: {error}")
            except BaseException:
                self.discard()
                raise

    def store_now(self, request: MaintenanceRequest, chain: Sequence[LocalRun]) -> Materialized:
        """Materialize a state at once, however long it takes; raises StorageError if it cannot be stored.

        Its batch may be repeated, so the local runs that it merges stay.
        """
        # Not the folder of jobs in slices, because two attempts may do this at the same time.
        self._folder = self.local.directory / f"{chain[-1].last}-{self.token}.{JOB_FOLDER}"
        try:
            job = self._begin(request, chain, ())
            assert job is not None, "the batch itself is not stored yet"
            while not job.is_done:
                job = self._step(job, request, float("inf"), keeps_inputs=True)
            return Materialized(job.levels, job.grant, self._inline(job) or b"")
        finally:
            self.discard()

    def _begin(self, request: MaintenanceRequest, chain: Sequence[LocalRun], merges: Sequence[LocalRun]) -> _Job | None:
        """Decide what to merge, and what to store."""
        self.discard()
        inputs = list(merges)
        grant = None if merges else request.grant
        levels: list[Level] = []
        if grant is not None:
            # The levels that hold the same changes as the chain's first runs, one for one, need not be stored again.
            for local_run, level in zip(chain, grant.known, strict=False):
                if (local_run.before, local_run.after) != (level.before, level.after):
                    break
                levels.append(level)
            if len(levels) == len(chain):
                return None
            runs = [self.local.open(local_run) for local_run in chain]
            rows = [run.rows for run in runs]
            # Levels that are small compared with the new rows are stored again with them, so that levels stay few.
            while levels and rows[len(levels) - 1] < 2 * sum(rows[len(levels) :]):
                levels.pop()
            if levels and sum(rows) > self.max_space_amplification * (sum(rows) - sum(map(self.garbage.rows_of, runs))):
                levels = []  # only a merge that starts at the empty state can leave out what has expired
            inputs = list(chain[len(levels) :])
            if levels and not sum(rows[len(levels) :]):
                return self._extend(grant, chain, levels)
        if not inputs:
            return None
        target = LocalRun.joined(inputs)
        self._folder.mkdir(exist_ok=True, mode=0o700)
        return _Job(
            run_id=self.run_id,
            target=target.file_name,
            merging=_Merging([local_run.file_name for local_run in inputs] if len(inputs) > 1 else []),
            garbage=self.garbage,
            grant=grant.job if grant else "",
            levels=levels,
            prefix=f"{grant.folder}/{target.last}-{self.token}" if grant else "",
        )

    def _extend(self, grant: Grant, chain: Sequence[LocalRun], levels: list[Level]) -> _Job:
        """Extend the last level to the later batches, which have changed nothing."""
        newest = len(levels) - 1
        target = LocalRun.joined(chain[newest:])
        self.local.link(chain[newest], target)
        levels[newest] = replace(levels[newest], last=target.last, after=target.after)
        self._folder.mkdir(exist_ok=True, mode=0o700)
        return self._save(_Job(run_id=self.run_id, garbage=self.garbage, grant=grant.job, levels=levels, is_done=True))

    def _fits(self, job: _Job, request: MaintenanceRequest, chain: Sequence[LocalRun]) -> bool:
        """Whether all local runs that a job reads are in the chain, and its objects where the grant lets it write."""
        names = {local_run.file_name for local_run in chain}
        folder = "" if request.grant is None else f"{request.grant.folder}/"
        is_inside = not job.grant or (job.prefix.startswith(folder) and is_plain(job.prefix))
        return is_inside and (set(job.merging.inputs) or {job.target}) <= names

    def _step(self, job: _Job, request: MaintenanceRequest, end_s: float, *, keeps_inputs: bool = False) -> _Job:
        if job.merging.inputs:
            return self._merge(job, end_s, keeps_inputs)
        if job.grant:
            return self._store_next(job, request)
        self.discard()
        return replace(job, is_done=True)

    def _merge(self, job: _Job, end_s: float, keeps_inputs: bool) -> _Job:
        """Merge slices until the time is over, or the result is complete and replaces the inputs."""
        merging, target = job.merging, LocalRun.named(job.target)
        runs = [self.local.open(LocalRun.named(name)) for name in merging.inputs]
        part = self._folder / "merge.part"
        part.open("ab").close()
        os.truncate(part, merging.size_bytes)
        with pa.OSFile(str(part), "ab") as sink:
            size_bytes = self.local.budget.slice_bytes
            writer = RunWriter(
                sink,
                compression=None,
                block_rows=self.local.policy.slice_rows,
                block_bytes=size_bytes,
                written=merging.written,
            )
            merge = RunMerge(
                runs,
                is_bottom=target.before == self.genesis,
                garbage=job.garbage,
                slice_rows=self.local.policy.slice_rows,
                slice_bytes=size_bytes,
                keeps_blocks=True,
            )
            for position in merge.write(writer, merging.position):
                if self.monotonic_s() >= end_s:
                    at = _Merging(merging.inputs, position, writer.written, sink.tell())
                    return self._save(replace(job, merging=at))
            writer.finish()
        part.rename(self.local.directory / target.file_name)
        if not keeps_inputs:
            self.local.remove(merging.inputs)
        return self._save(replace(job, merging=_Merging([])))

    def _store_next(self, job: _Job, request: MaintenanceRequest) -> _Job:
        """Store the run of the next range of hashes."""
        target = LocalRun.named(job.target)
        run = self.local.open(target)
        first = self.within.first if job.next_hash is None else job.next_hash
        count = -(-run.size_bytes // self.local.policy.stored_run_bytes)
        width = -(-(self.within.last - self.within.first + 1) // count)
        last = min(first + width - 1, self.within.last)
        runs = list(job.runs)
        if run.rows:
            sink = pa.BufferOutputStream()
            writer = RunWriter(
                sink,
                compression=self.compression,
                block_rows=STORED_BLOCK_ROWS,
                whole_bytes=STORED_BLOCK_BYTES,
            )
            part, slice_rows = HashRange(first, last), self.local.policy.slice_rows
            rows = merge_runs([run], writer, is_bottom=False, within=part, slice_rows=slice_rows)
            data = sink.getvalue().to_pybytes()
            name = f"{job.prefix}-{len(runs)}.run"
            if first == self.within.first and last == self.within.last and len(data) <= request.inline_bytes:
                name = ""
                write_file(self._folder / _INLINE, data)
            else:
                self.open_store().put(name, data)
                self.note_stored()
            runs.append(StoredRun(name, 0, len(data), digests.checksum(data), rows, first, last))
        if last < self.within.last:
            return self._save(replace(job, runs=runs, next_hash=last + 1))
        level = Level(target.first, target.last, target.before, target.after, self.within.first, self.within.last, runs)
        return self._save(replace(job, levels=[*job.levels, level], is_done=True))

    def _fail(self, request: MaintenanceRequest, reason: str) -> None:
        """Abandon the job, and note why for the next ack; the coordinator removes the objects that it has stored."""
        self.discard()
        if request.grant is not None:
            try:
                self._folder.mkdir(exist_ok=True, mode=0o700)
                job = _Job(run_id=self.run_id, garbage=self.garbage, grant=request.grant.job, failure=reason)
                self._save(job)
            except OSError as error:
                _log.warning("a materialization failed (%s), and its failure could not be recorded: %s", reason, error)

    # ---- The folder ----

    def _load(self) -> _Job | None:
        try:
            data = (self._folder / _STATE).read_bytes()
            job = unseal(data, _Job, kind=_KIND, version=_VERSION, name=str(self._folder / _STATE))
            job.require_sound(str(self._folder / _STATE))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except StatelogError as error:
            _log.warning("a materialization starts over: %s", error)
            self.discard()
            return None
        if job.run_id != self.run_id:
            self.discard()
            return None
        return job

    def _save(self, job: _Job) -> _Job:
        temporary = self._folder / f"{os.getpid()}.tmp"
        write_file(temporary, seal(job, _KIND, _VERSION))
        with removed_on_failure(temporary):
            temporary.rename(self._folder / _STATE)
        return job

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Yield whether no other process works on the subtask's job; a process that dies releases the lock."""
        lock = self.local.directory / "job.lock"
        with lock.open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
