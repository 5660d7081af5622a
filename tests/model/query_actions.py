"""The actions of a micro-batch, and the stages of each while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Self

from tests.model.query_graph import Graph, Row, operator_of

Task = tuple[str, int]
"""A subtask of an operator."""


@dataclass(frozen=True)
class Action:
    """What one action of a micro-batch runs."""

    targets: list[str]
    """The operators that it reads from."""
    is_cut: bool = False
    """Whether it reads only some partitions of that output."""


def whole_action(graph: Graph) -> Action:
    """An action that runs everything."""
    return Action(graph.ends)


def random_actions(random: Random, graph: Graph, *, is_partial: bool) -> list[Action]:
    """One to three actions; one of them runs everything, unless they are partial."""
    uids = graph.uids
    others = [
        Action(random.sample(uids, random.randint(1, len(uids))), random.random() < 0.3)
        for _ in range(random.choice([0, 0, 1, 2]))
    ]
    if is_partial:
        return [*others[:1], Action([random.choice(uids)], is_cut=True)]
    return random.sample([whole_action(graph), *others], len(others) + 1)


@dataclass
class Job:
    """An action while it runs: each operator is a stage, and the outputs of its ended tasks are kept."""

    graph: Graph
    uids: list[str]
    parallelism: Mapping[str, int]
    tasks: set[Task]
    """All tasks of the action."""
    source: Mapping[str, list[Row]]
    """The rows of the sources."""
    outputs: dict[Task, list[Row]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        action: Action,
        graph: Graph,
        parallelism: Mapping[str, int],
        source: Mapping[str, list[Row]],
        random: Random,
    ) -> Self:
        """Begin an action. One that is cut leaves out some tasks of its last stages."""
        uids = graph.needed(action.targets)
        tasks = {(uid, subtask) for uid in uids for subtask in range(parallelism[uid])}
        if action.is_cut:
            read = {up for uid in uids for up in graph.inputs[uid]}
            tasks -= {task for task in sorted(tasks) if task[0] not in read and random.random() < 0.6}
        return cls(graph, uids, parallelism, tasks, source)

    @property
    def is_whole(self) -> bool:
        """Whether the action runs all tasks of its operators."""
        return len(self.tasks) == sum(self.parallelism[uid] for uid in self.uids)

    def ready(self) -> list[Task]:
        """The tasks that can run now."""
        waiting = self.tasks - self.outputs.keys()
        unfinished = {uid for uid, _ in waiting}
        return sorted(task for task in waiting if not unfinished.intersection(self.graph.inputs[task[0]]))

    def can_be_lost(self) -> list[Task]:
        """The ended tasks whose output is still needed."""
        needed = {up for uid, _ in self.tasks - self.outputs.keys() for up in self.graph.inputs[uid]}
        return sorted(task for task in self.outputs if task[0] in needed)

    def input_of(self, task: Task) -> list[Row]:
        """The rows of a task that is ready."""
        uid, subtask = task
        inputs = self.graph.inputs[uid]
        rows = [row for one in inputs for row in self.output_of(one)] if inputs else self.source[uid]
        return operator_of(uid).parts(rows, self.parallelism[uid])[subtask]

    def output_of(self, uid: str) -> list[Row]:
        """The output of an operator, in order of its subtasks."""
        return [row for task in sorted(self.outputs) if task[0] == uid for row in self.outputs[task]]
