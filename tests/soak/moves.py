"""What may happen in a life: everything that is drawn at random, from a generator that is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from tests.model.keyed_commands import LISTS, MAPS, READ_ALL, SUMS, VALUES, Command, write_all
from tests.model.keyed_model import Key, Row, Rules
from tests.soak.servers import Harm

KEYS: Final[list[Key]] = [(None, None), (None, "x"), (5, None), (-1, "é"), *((n, str(n)) for n in range(24))]

_TEXTS: Final = ("", "a", "b", "long " * 8, "ü")


# ---- Settings ----


def random_rules(rng: Random) -> Rules:
    """How the operator of a life is set up."""
    by_event = rng.random() < 0.4
    return Rules(
        event_time=by_event,
        delay_ms=rng.choice([0, 10]) if by_event else None,
        ttl_ms=rng.choice([1, 15, 30]),
        ttl_by_event=by_event and rng.random() < 0.5,
        renews=rng.random() < 0.5,
    )


def random_options(rng: Random, *, appends: bool = True) -> dict[str, Any]:
    """Options; what a run has written must be readable with any others. `appends` says what the store can do."""
    return {
        "table": rng.choice(["runs", "runs", "memory", "rocksdb"]),
        "file_merging": rng.choice(["across" if appends else "auto", "within", "off"]),
        "max_file_bytes": rng.choice([4000, 32 << 20]),
        "max_space_amplification": rng.choice([1.0, 2.0]),
        "upload_part_bytes": rng.choice([1, 1000, 5 << 20]),
        "upload_threads": rng.choice([1, 3]),
        "merge_fan_in": rng.choice([2, 3, 5]),
        "inline_budget_bytes": rng.choice([0, 400, 8 << 20]),
        "retained_checkpoints": rng.choice([2, 2, 3, 3, 6]),
        "changelog": rng.random() < 0.8,
        "materialization": rng.random() < 0.95,
        "materialization_interval_s": rng.choice([0.0, 0.0, 3.0, 8.0, 600.0]),
        "materialization_max_failures": 1000,
        "max_log_to_base": 1e9,
        "compression": rng.choice(["lz4", "zstd", "none"]),
        "log_min_age_s": 0,
        "orphan_min_age_s": 0,
    }


@dataclass(frozen=True)
class Mood:
    """How a run goes.

    Parameters
    ----------
    is_calm : bool
        Nothing goes wrong, and no subtask moves: materialization must make progress then.
    actions : int
        How many actions ask for each batch; 0 is another number for each.
    hosts : int
        An attempt runs on any of so many.
    stay : float
        Share of the attempts that run where the subtask ran before.
    width : int
        Tasks that run at a time.
    fault_rate : float
        Share of the calls of a store that fail.
    death_rate : float
        Share of the attempts, and of the batches' drivers, that die.
    unrest : float
        Share of the batches after which the run ends, in good order or not.
    is_slow : bool
        Whether maintenance is over after a few steps, and continues after the next batch.
    """

    is_calm: bool = False
    actions: int = 0
    hosts: int = 1
    stay: float = 1.0
    width: int = 1
    fault_rate: float = 0.0
    death_rate: float = 0.0
    unrest: float = 0.2
    is_slow: bool = False


MOODS: Final = {"calm": Mood(is_calm=True, actions=2), "moving": Mood(hosts=3, stay=0.0, unrest=0.02)}
"""Those that a soak can have for all of its runs: nothing is left to chance in when a process is killed."""


def random_mood(rng: Random) -> Mood:
    """How the next run goes; a fifth of them are calm, and some others are long, though their subtasks move."""
    if rng.random() < 0.2:
        return Mood(
            is_calm=True, actions=rng.choice([1, 2, 2, 3]), width=rng.choice([1, 3]), is_slow=rng.random() < 0.3
        )
    is_long = rng.random() < 0.3
    return Mood(
        actions=rng.choice([0, 0, 1, 2]),
        hosts=rng.choice([1, 2, 3, 3]),
        stay=rng.choice([0.0, 0.5, 0.9]),
        width=rng.choice([1, 1, 2, 4]),
        fault_rate=rng.choice([0.0, 0.0, 0.02, 0.1]),
        death_rate=0.0 if is_long else rng.choice([0.0, 0.03, 0.1]),
        unrest=0.02 if is_long else rng.choice([0.05, 0.2]),
        is_slow=rng.random() < 0.5,
    )


def calm_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a calm run: every subtask materializes as often as it can."""
    return options | {"changelog": True, "materialization": True, "materialization_interval_s": 0.0}


def random_harm(rng: Random, mood: Mood, longest: int) -> Harm:
    """What goes wrong in a process, which passes about `longest` calls of the store and steps."""
    dies_at = rng.randint(1, longest) if rng.random() < mood.death_rate else 0
    return Harm(rng.randrange(1 << 32), mood.fault_rate, dies_at)


def random_task_harm(rng: Random, mood: Mood, longest: int) -> Harm:
    """As :func:`random_harm`, for a task: the disk of its host may be full, too."""
    is_full = rng.random() < mood.fault_rate
    return replace(random_harm(rng, mood, longest), disk_bytes=rng.choice([100, 600, 2000, 8000]) if is_full else 0)


# ---- Batches ----


@dataclass(frozen=True)
class BatchPlan:
    """A micro-batch.

    Parameters
    ----------
    now_ms : int
        Its time.
    seconds : float
        How far the clock goes on before it.
    actions : list of list of Row
        The rows of each action that asks for its output, the last of which counts. Those of others may be in another
        order, as a source without an order gives them.
    partial : dict
        The share of the subtasks that an action runs, by its place, if not all: one like ``take`` needs no more.
    """

    now_ms: int
    seconds: float
    actions: list[list[Row]]
    partial: dict[int, float] = field(default_factory=dict)


def random_batch(
    rng: Random, now_ms: int, *, actions: int, reads_all: bool = False, fills: bool = False, is_calm: bool = False
) -> BatchPlan:
    """The next batch; `fills` writes to all keys, so that the state is large beside what follows."""
    rows: list[Row] = [(key, None, READ_ALL) for key in KEYS] if reads_all else []
    if fills:
        rows += [(key, None, ["append", "list", *"abcdef"]) for key in KEYS]
        rows += [(key, None, write_all("filled", 1)) for key in KEYS]
    count = rng.choice([0, 1, 2, 2, 3, 5, 12])
    rows += [(rng.choice(KEYS), _time_of_row(rng, now_ms), random_command(rng)) for _ in range(count)]
    orders = [rows]
    for _ in range(actions - 1):
        others = list(rows)
        if rng.random() < 0.1:
            rng.shuffle(others)
        orders.insert(0, others)
    partial = {place: rng.random() for place in range(actions - 1) if rng.random() < 0.15 and not is_calm}
    return BatchPlan(now_ms, rng.choice([0.0, 0.5, 1.0, 3.0]), orders, partial)


def _time_of_row(rng: Random, now_ms: int) -> int | None:
    return None if rng.random() < 0.2 else max(0, now_ms + rng.randint(-20, 20))


def random_command(rng: Random) -> Command:
    """Something that the processor does to one of its states or timers, or reads."""
    text, n = rng.choice(_TEXTS), rng.randint(-(1 << 40), 1 << 40)
    texts = [rng.choice(_TEXTS) for _ in range(rng.randint(1, 3))]
    value, of_list, of_map, of_sum = (rng.choice(names) for names in (VALUES, LISTS, MAPS, SUMS))
    anything = rng.choice((*VALUES, *LISTS, *MAPS, *SUMS))
    delays = [rng.randint(-9, 15) for _ in range(rng.randint(1, 4))]
    common: list[Command] = [
        ["set", value, n],
        ["add", of_sum, n],
        ["append", of_list, *texts],
        ["put", of_map, text, n],
        ["remove", of_map, text],
        ["register", "+", *delays],
        write_all(text, n),
        READ_ALL,
    ]
    rare: list[Command] = [
        ["replace", of_list, *texts],
        ["clear", anything],
        ["exists", anything],
        ["delete", "+", delays[0]],
        ["get", value],
        ["sum", of_sum],
        ["elements", of_list],
        ["lookup", of_map, text],
        ["contains", of_map, text],
        ["entries", of_map],
    ]
    return rng.choice([*common * 3, *rare])
