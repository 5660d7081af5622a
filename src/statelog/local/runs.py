"""Local runs and snapshots: the files of one subtask's directory, which the host's Python workers share.

A local run holds the changes of some successive batches. Its name has the chain digests before and after them. The
state of a checkpoint is a chain of local runs from the empty state to the checkpoint's digest, so a file of a failed
attempt, another epoch or another history is simply not in the chain.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import pyarrow as pa
import xxhash

from statelog.errors import CorruptionError
from statelog.files import removed_on_failure, write_file
from statelog.local.policy import MERGE_POLICY, MergePolicy
from statelog.runs import digests
from statelog.runs.byte_slices import BUDGET, Budget
from statelog.runs.key_groups import HashRange
from statelog.runs.merge import Garbage, add_runs, merge_runs
from statelog.runs.reader import Run
from statelog.runs.writer import LOCAL_BLOCK_ROWS, RunWriter

_SECOND_NS: Final = 10**9


class FileStamps:
    """Decides without reading a local file whether it is unchanged since it was written or checked.

    A stamp is in the file's modification time: its nanoseconds are a hash of the whole seconds, the size, and the id of
    the system's boot, which the file `boot_id` has. A later write sets another time. After a boot no stamp is valid,
    because data that had not yet reached the disk is lost. Blocks that change by themselves fail their checksums.

    Where the system has no boot id, no file has a stamp, so all files are checked whenever they are opened.
    """

    def __init__(self, boot_id: Path) -> None:
        self._boot_id = boot_id

    def stamp(self, path: Path) -> None:
        """Mark a file whose content is right, if the file system allows times to be set; raises FileNotFoundError."""
        boot = self._boot()
        if boot is not None:
            status = path.stat()
            with suppress(PermissionError):
                os.utime(path, ns=(status.st_atime_ns, _stamped_ns(status, boot)))

    def is_stamped(self, path: Path) -> bool:
        """Whether a file is unchanged since it was marked, since the last boot; raises FileNotFoundError."""
        boot = self._boot()
        status = path.stat()
        return boot is not None and status.st_mtime_ns == _stamped_ns(status, boot)

    def _boot(self) -> str | None:
        return self._boot_id.read_text() if self._boot_id.exists() else None


def _stamped_ns(status: os.stat_result, boot: str) -> int:
    second = status.st_mtime_ns // _SECOND_NS
    stamped = f"{boot} {second} {status.st_size}"
    return second * _SECOND_NS + xxhash.xxh3_64_intdigest(stamped.encode()) % _SECOND_NS


FILE_STAMPS: Final = FileStamps(Path("/proc/sys/kernel/random/boot_id"))


# ---- Runs ----


JOB_FOLDER: Final = "job"
"""Folder next to the runs with the progress of a materialization job."""
ROCKSDB_FOLDER: Final = "rocksdb"
"""Folder next to the runs with the RocksDB table that is made from them."""
_KEPT_NAMES: Final = frozenset({JOB_FOLDER, "job.lock"})
_UNFINISHED: Final = (".tmp", f".{JOB_FOLDER}")
_EDGE: Final = re.compile(r"(-?\d+)-(-?\d+)-([0-9a-f]{32})-([0-9a-f]{32})\.run")


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A local file with the changes of batches `first` to `last`, both included."""

    first: int
    last: int
    before: bytes
    """Chain digest before the first batch."""
    after: bytes
    """Chain digest after the last batch."""

    @property
    def file_name(self) -> str:
        """Name of the file."""
        return f"{self.first}-{self.last}-{self.before.hex()}-{self.after.hex()}.run"

    @classmethod
    def parse(cls, file_name: str) -> LocalRun | None:
        """The local run of a file; None for other files."""
        found = _EDGE.fullmatch(file_name)
        if found is None:
            return None
        return cls(int(found[1]), int(found[2]), bytes.fromhex(found[3]), bytes.fromhex(found[4]))

    @classmethod
    def named(cls, file_name: str) -> LocalRun:
        """The local run of a file that is known to be one."""
        local_run = cls.parse(file_name)
        assert local_run is not None, file_name
        return local_run

    @classmethod
    def joined(cls, local_runs: Sequence[LocalRun]) -> LocalRun:
        """The local run with the changes of adjacent ones, oldest first."""
        oldest, newest = local_runs[0], local_runs[-1]
        return cls(oldest.first, newest.last, oldest.before, newest.after)


@dataclass(eq=False)
class LocalRuns:
    """The local runs of one subtask.

    Several processes may use the directory at once: files are written under other names and then renamed,
    and a file that disappears is treated as one that was never there. The directory is made with the first file.

    A `token` is unique among the directory's writers, and begins with the batch that writes.
    """

    directory: Path
    budget: Budget = BUDGET
    policy: MergePolicy = MERGE_POLICY
    stamps: FileStamps = FILE_STAMPS

    def __post_init__(self) -> None:
        self._opened: dict[str, Run] = {}

    def local_runs(self) -> list[LocalRun]:
        """All local runs in the directory, not opened."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return [local_run for name in names if (local_run := LocalRun.parse(name)) is not None]

    def chain(self, start: bytes, head: bytes) -> list[LocalRun] | None:
        """A chain from one digest to another, oldest first, of runs as long as possible; None if none leads there."""
        by_after: dict[bytes, list[LocalRun]] = {}
        for local_run in sorted(self.local_runs(), key=lambda local_run: local_run.first, reverse=True):
            by_after.setdefault(local_run.after, []).append(local_run)
        # Depth-first from the head to the start, the longest local runs first.
        pending: list[tuple[bytes, list[LocalRun]]] = [(head, [])]
        seen: set[bytes] = set()
        while pending:
            digest, chain = pending.pop()
            if digest == start:
                return chain[::-1]
            if digest not in seen:
                seen.add(digest)
                pending.extend((local_run.before, [*chain, local_run]) for local_run in by_after.get(digest, ()))
        return None

    def open(self, local_run: LocalRun) -> Run:
        """Map a run into memory; it stays open.

        A file without a valid stamp is read and checked. A damaged file is removed, with CorruptionError; if
        another process has removed the file, FileNotFoundError is raised.
        """
        run = self._opened.get(local_run.file_name)
        if run is None:
            path = self.directory / local_run.file_name
            try:
                if not self.stamps.is_stamped(path):
                    self._map(path, is_trusted=False).verify()
                    self.stamps.stamp(path)
                run = self._map(path)
            except (CorruptionError, pa.ArrowInvalid):
                self._discard(path)
                raise
            self._opened[local_run.file_name] = run
        return run

    def write_new(self, write: Callable[[pa.NativeFile], None], token: str) -> Path:
        """Let `write` fill a temporary file; :meth:`keep` then gives it its name. It is removed if `write` fails."""
        temporary = self._temporary(token)
        with removed_on_failure(temporary), pa.OSFile(str(temporary), "wb") as sink:
            write(sink)
        return temporary

    def keep(self, written: Path, local_run: LocalRun) -> None:
        """Rename a file that was written just now to its local run, and open it without a check.

        It is mapped under its first name: another attempt of the batch that fails removes the second one.
        """
        path = self.directory / local_run.file_name
        with removed_on_failure(written):
            run = _map(written, str(path), on_damage=partial(self._discard, path), is_trusted=True)
            self.stamps.stamp(written)
            written.rename(path)
        self._opened[local_run.file_name] = run

    def write_merged(
        self,
        local_run: LocalRun,
        runs: Iterable[Run],
        token: str,
        *,
        is_bottom: bool,
        within: HashRange | None = None,
        garbage: Garbage | None = None,
    ) -> None:
        """Merge runs, oldest first, into one local run.

        `is_bottom` says that the result begins at the empty state, so removals are not kept. Keys with hashes outside
        `within` are left out. However many runs there are, only some are in memory at once: groups are merged into
        temporary files, and these, mapped, into the result.
        """
        temporary = self._temporary(token)
        merged: list[Run] = []
        groups = _in_groups(runs, self.policy)
        group = next(groups, [])
        with removed_on_failure(temporary):
            for following in groups:
                # Only the oldest rows may lose their removals before all are merged.
                is_oldest = is_bottom and not merged
                self._merge_to(temporary, group, is_bottom=is_oldest, within=within, garbage=garbage)
                merged.append(_map(temporary, is_trusted=True))
                temporary.unlink()  # it stays mapped
                group = following
            self._merge_to(temporary, [*merged, *group], is_bottom=is_bottom, within=within, garbage=garbage)
        self.keep(temporary, local_run)

    def write_disjoint(
        self,
        local_run: LocalRun,
        runs: Iterable[Run],
        rows: int,
        token: str,
        *,
        is_bottom: bool,
        within: HashRange,
        garbage: Garbage | None,
    ) -> None:
        """Write runs one after the other into one local run; only one of them is in memory at once.

        Runs that hold rows of the same state are disjoint, and come in order of their hashes. `rows` is the
        total number of rows. The other arguments are those of :meth:`write_merged`.
        """
        temporary = self._temporary(token)
        with removed_on_failure(temporary), pa.OSFile(str(temporary), "wb") as sink:
            writer = self._writer(sink)
            for run in runs:
                add_runs(
                    [run],
                    writer,
                    is_bottom=is_bottom,
                    within=within,
                    garbage=garbage,
                    slice_rows=self.policy.block_rows(rows),
                    slice_bytes=self.budget.slice_bytes,
                )
                del run  # the next one reuses its memory
            writer.finish()
        self.keep(temporary, local_run)

    def _writer(self, sink: pa.NativeFile) -> RunWriter:
        return RunWriter(sink, compression=None, block_rows=LOCAL_BLOCK_ROWS, block_bytes=self.budget.slice_bytes)

    def _merge_to(
        self, path: Path, runs: Sequence[Run], *, is_bottom: bool, within: HashRange | None, garbage: Garbage | None
    ) -> None:
        with pa.OSFile(str(path), "wb") as sink:
            merge_runs(
                runs,
                self._writer(sink),
                is_bottom=is_bottom,
                within=within,
                garbage=garbage,
                slice_rows=self.policy.most_block_rows,
                slice_bytes=self.budget.slice_bytes,
            )

    def _temporary(self, token: str) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self.directory / f"{token}.tmp"

    def _map(self, path: Path, *, is_trusted: bool = True) -> Run:
        return _map(path, on_damage=partial(self._discard, path), is_trusted=is_trusted)

    def _discard(self, path: Path) -> None:
        """Remove a damaged file, and forget its map, because another process may bring the file back."""
        self._opened.pop(path.name, None)
        path.unlink(missing_ok=True)

    def merge(
        self, local_runs: Sequence[LocalRun], genesis: bytes, token: str, *, garbage: Garbage | None = None
    ) -> LocalRun:
        """Merge adjacent runs of a chain, oldest first, into one that replaces them; all must be certain."""
        local_run = LocalRun.joined(local_runs)
        runs = [self.open(part) for part in local_runs]
        self.write_merged(local_run, runs, token, is_bottom=local_run.before == genesis, garbage=garbage)
        self.remove([part.file_name for part in local_runs])
        return local_run

    def link(self, local_run: LocalRun, longer: LocalRun) -> None:
        """Give a run a second name, for itself and later batches that have changed nothing."""
        (self.directory / longer.file_name).unlink(missing_ok=True)
        os.link(self.directory / local_run.file_name, self.directory / longer.file_name)

    def remove(self, file_names: Iterable[str]) -> None:
        """Remove files that a merged run replaces."""
        for name in file_names:
            (self.directory / name).unlink(missing_ok=True)

    def sweep(self, chain: Sequence[LocalRun], certain: int, *, keeps_rocksdb: bool = False) -> None:
        """Remove files of batches up to `certain` that are not in the chain, and forget their maps.

        Such files come from attempts that failed and from other histories. A file that shortens the chain stays:
        another attempt of the batch has just merged the runs that it replaces. Unfinished files stay as well: another
        start of the query, which repeats an earlier batch, may be writing them, and `in_use` removes those of killed
        processes. The RocksDB table is removed unless it is still used (`keeps_rocksdb`).
        """
        kept = {local_run.file_name for local_run in chain} | ({ROCKSDB_FOLDER} if keeps_rocksdb else set())
        digests = {digest for local_run in chain for digest in (local_run.before, local_run.after)}
        for name in os.listdir(self.directory) if self.directory.exists() else ():
            local_run = LocalRun.parse(name)
            is_shortcut = local_run is not None and local_run.before in digests and local_run.after in digests
            is_later = local_run is not None and local_run.last > certain
            if name in kept or name in _KEPT_NAMES or name.endswith(_UNFINISHED) or is_later or is_shortcut:
                continue
            if name == ROCKSDB_FOLDER:
                shutil.rmtree(self.directory / name, ignore_errors=True)
            else:
                (self.directory / name).unlink(missing_ok=True)
        for name in [name for name in self._opened if name not in kept]:
            del self._opened[name]

    def digests(self, start: bytes) -> list[bytes]:
        """All digests that local runs lead to from `start`, itself included."""
        by_before: dict[bytes, list[LocalRun]] = {}
        for local_run in self.local_runs():
            by_before.setdefault(local_run.before, []).append(local_run)
        reached = [start]
        for digest in reached:
            reached.extend(local_run.after for local_run in by_before.get(digest, ()) if local_run.after not in reached)
        return reached


def _in_groups(runs: Iterable[Run], policy: MergePolicy) -> Iterator[list[Run]]:
    group: list[Run] = []
    size_bytes = 0
    for run in runs:
        group.append(run)
        size_bytes += run.size_bytes
        if len(group) >= policy.group_runs or size_bytes >= policy.group_bytes:
            yield group
            group, size_bytes = [], 0
    if group:
        yield group


def _map(
    path: Path, name: str | None = None, *, on_damage: Callable[[], None] | None = None, is_trusted: bool = False
) -> Run:
    """Map a file into memory; messages refer to it as `name`."""
    with pa.memory_map(str(path)) as mapped:
        return Run(mapped.read_buffer(), name or str(path), on_damage=on_damage, is_trusted=is_trusted)


# ---- ---- Snapshots of unkeyed state ---- ----


class LocalSnapshots:
    """The local snapshots of one subtask; the directory is made with the first file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def read(self, checksum: bytes) -> bytes | None:
        """The snapshot with a checksum; None if it is missing or damaged."""
        try:
            data = self._path(checksum).read_bytes()
        except FileNotFoundError:
            return None
        return data if digests.checksum(data) == checksum else None

    def write(self, checksum: bytes, data: bytes, batch: int, token: str) -> None:
        """Keep a snapshot of a batch; `token` is unique among the directory's writers."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = self.directory / f"{batch}-{token}.tmp"
        write_file(temporary, data)
        with removed_on_failure(temporary):
            temporary.rename(self._path(checksum))

    def sweep(self, kept: Collection[bytes]) -> None:
        """Remove all snapshots but those of some checksums; unfinished files are left to `in_use`."""
        names = {self._path(checksum).name for checksum in kept}
        for name in os.listdir(self.directory) if self.directory.exists() else ():
            if name not in names and not name.endswith(".tmp"):
                (self.directory / name).unlink(missing_ok=True)

    def _path(self, checksum: bytes) -> Path:
        return self.directory / f"{checksum.hex()}.snapshot"
