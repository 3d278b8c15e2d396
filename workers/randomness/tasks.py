"""The tasks that a teacher told of, and which of them each episode of a runner gets. No worker asks another one."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from headrace.schemas.chunks.task import Place, Task, task_name, values_at
from headrace.schemas.messages import Tasks
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.randomness.seeds import SeedTree

log = logging.getLogger(__name__)

MOST_REFUSALS = 3
_TASK_STREAM = 4
"""The child of an env's branch in the tree of seeds from which its tasks are drawn."""
_LAP = 1 << 40
"""The number of the first group of workers from `num_workers` on; twice it for workers from twice that number on."""

Opening = tuple[int | None, Task | None, int]
"""The start of an episode: the seed of its group (None: the env's own next one), its task, and the task's index."""


class TaskDraws:
    """The draws of the envs of one runner. True while there are tasks.

    The task of an env's episode n is drawn from a stream of its own, a further child of the env's branch in the tree of
    seeds. So it depends on the message, the env and n alone, and a runner that continues a state goes on with it.

    In groups of G, the k-th episode that env `e` of worker `w` begins under a version has position
    p = (k * num_workers + w) * num_envs + e: it is member p % G of group p // G. The group's seed and task are drawn
    from the version and the group's number, so that all workers agree; rules have the values of its first member's env.
    A worker that is restarted begins with k = 0 again.
    """

    def __init__(self, config: EnvRunnerConfig, worker_index: int, seeds: SeedTree) -> None:
        self._entropy, self._worker, self._incarnation = seeds.entropy, worker_index, seeds.seats.incarnation
        self._most_seed, self._width = config.max_env_seed, config.num_envs
        self._workers = max(config.num_workers, 1)
        self._told: Tasks | None = None
        self.begun: dict[int, int] = {}
        """Lane -> index of the task of its newest episode."""
        self.refused = ""
        """The tasks that the envs refuse, with the reasons, in words; "" if they take all."""
        self.set(None)

    def __bool__(self) -> bool:
        return self._told is not None

    def set(self, told: Tasks | None) -> None:
        """Draw from these tasks from now on; None or an empty list: from none. The present version changes nothing."""
        if told is not None and self._told is not None and told.version == self._told.version:
            return
        self.refused = ""
        self._told = told if told is not None and told.tasks else None
        self._names = [task_name(task.values) for task in told.tasks] if told is not None else []
        self._first: dict[int, int] = {}
        """Lane -> number of its first episode under this version."""
        self._next: dict[int, tuple[int, Opening]] = {}
        """Lane -> number and opening of its next episode, once it was asked for."""
        self._left_out: set[int] = set()
        self._refusals: dict[int, int] = {}
        self._sum_up()

    def _sum_up(self) -> None:
        """Note which tasks may be drawn, and the sums of their weights: of thousands, a draw has no time for that."""
        tasks, group = (self._told.tasks, self._told.group) if self._told is not None else ([], 0)
        self._choices = [index for index in range(len(tasks)) if group or index not in self._left_out]
        self._sums = np.cumsum([tasks[index].weight for index in self._choices])

    def peek(self, lane: int, number: int) -> Opening:
        """Return how episode `number` of the lane, its next one, begins. Drivers of external episodes call it too."""
        openings, told = self._next, self._told  # in this order, since `set` may come from another thread
        if told is None:
            return None, None, -1
        if (known := openings.get(lane)) is None or known[0] != number:
            known = openings[lane] = number, self._draw(told, lane, number)
        return known[1]

    def _draw(self, told: Tasks, lane: int, number: int) -> Opening:
        """Return an opening. A group's episode whose task is left out here has none: the member is missing."""
        if told.group:
            return self._draw_in_group(told, lane, number)
        if not self._choices:
            return None, None, -1
        index = self._choices[0]
        if len(self._choices) > 1:  # a stream takes 20 us
            key = (self._worker, self._incarnation, lane, _TASK_STREAM, number)
            index = self._pick(np.random.SeedSequence(self._entropy, spawn_key=key))
        place = Place(self._worker, self._workers, lane, self._width)
        return None, Task(told.version, values_at(told.tasks[index].values, place), published=self._names[index]), index

    def _draw_in_group(self, told: Tasks, lane: int, number: int) -> Opening:
        workers, width = self._workers, self._width
        lap, worker = divmod(self._worker, workers)
        k = number - self._first.setdefault(lane, number)
        group, member = divmod((k * workers + worker) * width + lane, told.group)
        first = group * told.group
        place = Place(lap * workers + first // width % workers, workers, first % width, width)
        group += lap * _LAP
        root = np.random.SeedSequence([*told.version, group])
        seed = int(np.random.default_rng(root).integers(0, self._most_seed, dtype=np.int64, endpoint=True))
        index = self._pick(root.spawn(1)[0])
        if index in self._left_out:
            return seed, None, -1
        values = values_at(told.tasks[index].values, place)
        return seed, Task(told.version, values, group, member, self._names[index]), index

    def _pick(self, root: np.random.SeedSequence) -> int:
        """Return the index of a task, drawn by the weights."""
        at = int(np.searchsorted(self._sums, np.random.default_rng(root).random() * self._sums[-1], side="right"))
        return self._choices[min(at, len(self._choices) - 1)]

    def note_begun(self, lanes: Iterable[int]) -> None:
        """Note that the newest episodes of `lanes` have begun: their tasks were not refused."""
        for lane in lanes if self._refusals else ():
            self._refusals.pop(self.begun.get(lane, -1), None)

    def refuse(self, lane: int, task: Task, why: str) -> None:
        """Count a reset with `task` that failed in the lane. Leave the task out after `MOST_REFUSALS` in a row."""
        index = self.begun.get(lane, -1)
        if self._told is None or task.version != self._told.version or index < 0:
            return
        count = self._refusals[index] = self._refusals.get(index, 0) + 1
        if count == MOST_REFUSALS:
            self._left_out.add(index)
            self._next.clear()
            self._sum_up()
            log.error("task %r failed %d resets in a row; this worker leaves it out", dict(task.values), count)
            of_all, values = f"{len(self._left_out)} of {len(self._told.tasks)}", f"{dict(task.values)!r:.60}"
            self.refused = f"{of_all} tasks left out, the newest after {count} failed resets: {values} ({why:.75})"
