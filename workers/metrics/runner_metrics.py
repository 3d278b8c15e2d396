"""A runner's sampled steps and finished episodes, under the names that RLlib's users know."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.task import Task
from headrace.schemas.errors import StateError
from headrace.workers.metrics.logger import FigureWindow, MetricsLogger, Path, build_report
from headrace.workers.metrics.timers import TIMERS
from headrace.workers.metrics.totals import REPORTED, RunnerTotals

MOST_FINISHED = 10_000
"""Finished episodes kept until they are taken. Only workers take them, and other users' memory must stay flat too."""


class RunnerMetrics:
    """Steps and episodes as they are delivered. The totals count the lost steps, by reason.

    An episode counts when its last chunk is delivered, with the sums of all its chunks. Figures of episodes are over
    the newest `window` of them.
    """

    def __init__(self, window: int, totals: RunnerTotals) -> None:
        self._totals = totals
        self._window = window
        self.logger = MetricsLogger(self._window, RESERVED)
        self._returns: deque[float] = deque(maxlen=self._window)
        self._lengths: deque[int] = deque(maxlen=self._window)
        self._durations: deque[float] = deque(maxlen=self._window)
        self._by_name: defaultdict[Path, deque[Any]] = defaultdict(lambda: deque(maxlen=window))
        """Figures by (figure, agent or module)."""
        self._steps: dict[Path, int] = {}
        self._untrained = 0
        self._untrained_returns: deque[float] = deque(maxlen=self._window)
        self._untrained_lengths: deque[int] = deque(maxlen=self._window)
        self._untrained_finished: deque[tuple[float, int]] = deque(maxlen=MOST_FINISHED)
        self._episodes = 0
        self._episodes_lifetime = 0
        self._reported_steps = 0
        self._reported_at = time.perf_counter()
        self._finished: deque[tuple[float, int]] = deque(maxlen=MOST_FINISHED)
        self.steps_before = 0
        """Lifetime steps of earlier lives, as restored from a checkpoint."""
        self.count_losses: Callable[[], Mapping[str, int]] = dict
        """Function that returns the further losses of one kind of runner in this life, by counter name."""
        self._lost_before: dict[str, int] = {}

    def add(self, batch: ChunkBatch, chunks: int, duration_of: Callable[[int], float]) -> None:
        """Count the first `chunks` rows of `batch`, of one agent; `duration_of` a row is its episode's, in seconds."""
        table = batch.table[:chunks]
        if self.add_table(table, batch):
            self._durations.extend(duration_of(row) for row in np.flatnonzero(_done(table)).tolist())

    def add_table(self, table: NDArray[np.void], batch: ChunkBatch) -> int:
        """Count chunks of one agent, known only as rows of `batch`. Return how many episodes ended in them."""
        done = _done(table)
        returns, lengths = table["episode_return"][done].tolist(), table["episode_length"][done].tolist()
        agent, module = batch.agents[0], batch.modules[0]
        self.count_steps({agent: batch.steps}, {module: batch.steps}, {agent: batch.steps})
        if not returns:
            return 0
        numbers = [] if batch.task_of is None else batch.task_of[: len(table)][done].tolist()
        self._add_episodes(returns, lengths, [batch.tasks[number - 1] if number else None for number in numbers])
        self._by_name["agent_episode_returns_mean", agent].extend(returns)
        self._by_name["agent_steps", agent].extend(lengths)
        self._by_name["module_episode_returns_mean", module].extend(returns)
        return len(returns)

    def add_agents(self, batch: ChunkBatch) -> None:
        """Add the agents whose episodes end in `batch`, of one module of several, to the figures by agent."""
        for row in batch.table[_done(batch.table)]:
            agent = batch.agents[row["agent"]]
            self._by_name["agent_episode_returns_mean", agent].append(float(row["episode_return"]))
            self._by_name["agent_steps", agent].append(int(row["episode_length"]))

    def add_episodes(self, episodes: Sequence[tuple[float, int]]) -> None:
        """Count whole episodes that are known only as (return, length)."""
        self._add_episodes([earned for earned, _ in episodes], [length for _, length in episodes])

    def add_untrained(self, episode_return: float, length: int) -> None:
        """Count an ended episode that is excluded from training. It is in no other figure."""
        self._untrained += 1
        self._untrained_finished.append((episode_return, length))
        self._untrained_returns.append(episode_return)
        self._untrained_lengths.append(length)

    def count_steps(self, agents: Mapping[str, int], modules: Mapping[str, int], actions: Mapping[str, int]) -> None:
        """Count delivered observations by agent and by module, and delivered actions by agent."""
        for figure, by_name in zip(NAMED_COUNTERS, (agents, modules, actions), strict=True):
            for name, count in by_name.items():
                for counter in (figure, f"{figure}_lifetime"):
                    self._steps[counter, name] = self._steps.get((counter, name), 0) + count

    def add_episode(
        self,
        episode_return: float,
        length: int,
        duration_s: float,
        agents: Mapping[str, tuple[float, int]],
        modules: Mapping[str, float],
        task: Task | None = None,
    ) -> None:
        """Count an episode of several agents, delivered to its end.

        `agents` has (return, steps) by agent, `modules` the return by module.
        """
        self._durations.append(duration_s)
        self._add_episodes([episode_return], [length], [task])
        for agent, (agent_return, steps) in agents.items():
            self._by_name["agent_episode_returns_mean", agent].append(agent_return)
            self._by_name["agent_steps", agent].append(steps)
        for module, module_return in modules.items():
            self._by_name["module_episode_returns_mean", module].append(module_return)

    def _add_episodes(self, returns: list[float], lengths: list[int], tasks: Iterable[Task | None] = ()) -> None:
        for earned, length, task in zip(returns, lengths, tasks, strict=False):  # none: no episode had a task
            if task is not None:
                self._totals.count_ended(task.published, earned, length)
        self._returns.extend(returns)
        self._lengths.extend(lengths)
        self._finished.extend(zip(returns, lengths, strict=True))
        self._episodes += len(returns)
        self._episodes_lifetime += len(returns)

    def take_finished(self, most: int = MOST_FINISHED) -> list[tuple[float, int]]:
        """Return (return, length) of whole episodes delivered since the last call, up to `most`, the oldest first.

        Only the newest `MOST_FINISHED` are kept.
        """
        return [self._finished.popleft() for _ in range(min(most, len(self._finished)))]

    def take_untrained(self, most: int) -> list[tuple[float, int]]:
        """Return (return, length) of up to `most` episodes that are not trained on, the oldest first."""
        return [self._untrained_finished.popleft() for _ in range(min(most, len(self._untrained_finished)))]

    @property
    def steps_lifetime(self) -> int:
        """Env steps delivered in this life and earlier ones."""
        return self.steps_before + self._totals.env_steps_delivered

    def read_counters(self) -> dict[str, Any]:
        """Return lifetime counters by the names they have in a report."""
        counters: dict[str, Any] = {
            "num_env_steps_sampled_lifetime": self.steps_lifetime,
            "num_episodes_lifetime": self._episodes_lifetime,
            **self._losses(),
        }
        for (counter, name), count in self._steps.items():
            if counter.endswith("_lifetime"):
                counters.setdefault(counter, {})[name] = count
        return counters

    def _lost_now(self) -> dict[str, int]:
        return {
            **{name: getattr(self._totals, counter) for name, counter in REPORTED.items()},
            **({"num_untrained_episodes_lifetime": self._untrained} if self._untrained else {}),
            **(
                {"num_observations_outside_lifetime": outside} if (outside := self._totals.observations_outside) else {}
            ),
            **self.count_losses(),
        }

    def _losses(self) -> dict[str, int]:
        """Return the loss counters of this life and earlier ones."""
        now, before = self._lost_now(), self._lost_before
        return {name: now.get(name, 0) + before.get(name, 0) for name in {**now, **before}}

    def write_counters(self, counters: Mapping[str, Any]) -> None:
        """Continue counting from the counters in `counters`; other entries are ignored.

        Raises `StateError`, changing nothing, for a counter of the wrong type.
        """
        try:
            single = {name: int(counters[name]) for name in SINGLE_COUNTERS if name in counters}
            lost = {name: int(counters[name]) for name in LOSS_COUNTERS if name in counters}
            named: dict[Path, int] = {
                (f"{counter}_lifetime", str(name)): int(count)
                for counter in NAMED_COUNTERS
                for name, count in counters.get(f"{counter}_lifetime", {}).items()
            }
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise StateError(f"lifetime counters are numbers, or numbers by name: {error}") from error
        delivered = self._totals.env_steps_delivered
        self.steps_before = single.get("num_env_steps_sampled_lifetime", self.steps_lifetime) - delivered
        self._episodes_lifetime = single.get("num_episodes_lifetime", self._episodes_lifetime)
        self._steps |= named
        now = self._lost_now()
        self._lost_before |= {name: count - now.get(name, 0) for name, count in lost.items()}

    def report(self, weights_seq: int = 0) -> dict[str, Any]:
        """Return counts since the last report, lifetime sums, and figures of the window. Omit figures without values.

        "weights_seq_no" is `weights_seq`, the number of the weights in use. 0 stands for the module's initial weights,
        and then the figure is absent. `merge_metrics` makes one report of several runners', with the newest weights
        that any of them uses.
        """
        totals, now = self._totals, time.perf_counter()
        steps = totals.env_steps_delivered - self._reported_steps
        sums: dict[Path, float] = {
            ("num_env_steps_sampled",): steps,
            ("num_env_steps_sampled_lifetime",): self.steps_lifetime,
            ("num_env_steps_sampled_lifetime_throughput",): steps / max(now - self._reported_at, 1e-9),
            ("num_episodes",): self._episodes,
            ("num_episodes_lifetime",): self._episodes_lifetime,
            **{(name,): count for name, count in self._losses().items()},
            **{path: count for path, count in self._steps.items() if count},
            **{("time_s_lifetime", part): seconds for part, seconds in totals.timers.budget.seconds().items()},
            **self.logger.take_sums(),
        }
        self._reported_steps, self._reported_at, self._episodes = totals.env_steps_delivered, now, 0
        self._steps = {path: count for path, count in self._steps.items() if path[0].endswith("_lifetime")}
        own = [
            *self._windows(),
            *totals.timers.windows(),
            FigureWindow(("weights_seq_no",), "max", [weights_seq] if weights_seq else []),
        ]
        return build_report(sums, [*own, *self.logger.windows()])

    def _windows(self) -> list[FigureWindow]:
        figures = [
            FigureWindow((f"{name}_{reduce}",), reduce, values)
            for name, values in (("episode_return", self._returns), ("episode_len", self._lengths))
            for reduce in ("mean", "min", "max")
        ]
        figures.append(FigureWindow(("untrained_episode_return_mean",), "mean", self._untrained_returns))
        figures.append(FigureWindow(("untrained_episode_len_mean",), "mean", self._untrained_lengths))
        figures.append(FigureWindow(("episode_duration_sec_mean",), "mean", self._durations))
        return figures + [FigureWindow(path, "mean", values) for path, values in self._by_name.items()]


def _done(table: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which chunks are the last of an episode that has ended."""
    return np.asarray((table["end"] == ChunkEnd.TERMINATED) | (table["end"] == ChunkEnd.TRUNCATED))


SINGLE_COUNTERS = ("num_env_steps_sampled_lifetime", "num_episodes_lifetime")
"""Lifetime counters of delivered steps and episodes."""
LOSS_COUNTERS = (
    *REPORTED,
    "num_agent_steps_discarded_lifetime",
    "num_agent_rewards_lost_lifetime",
    "num_final_observations_repeated_lifetime",
    "num_final_steps_dropped_lifetime",
    "num_untrained_episodes_lifetime",
    "num_observations_outside_lifetime",
)
"""Lifetime counters of failures, and of steps and episodes lost by them or withheld by clients.

Each life of a runner counts these from 0.
"""
NAMED_COUNTERS = ("num_agent_steps_sampled", "num_module_steps_sampled", "num_actions_by_agent")
"""Counters by agent or module. Each has a lifetime counter too, with `_lifetime` after its name."""

RESERVED = frozenset(
    (
        "num_env_steps_sampled",
        "num_env_steps_sampled_lifetime_throughput",
        "num_episodes",
        "agent_rewards_lost_lifetime",
        *(f"{name}_{reduce}" for name in ("episode_return", "episode_len") for reduce in ("mean", "min", "max")),
        "episode_duration_sec_mean",
        "untrained_episode_return_mean",
        "untrained_episode_len_mean",
        "agent_episode_returns_mean",
        "agent_steps",
        "module_episode_returns_mean",
        "windows",
        "weights_seq_no",
        "time_s_lifetime",
        *TIMERS,
        *SINGLE_COUNTERS,
        *LOSS_COUNTERS,
        *NAMED_COUNTERS,
        *(f"{name}_lifetime" for name in NAMED_COUNTERS),
    )
)
"""Names of a report that a callback cannot log under. Rates are per second, durations in seconds. Add the name of a new
figure here, and that of a new lifetime counter to its group; counters of `RunnerTotals` bear their names there.

num_agent_steps_sampled and num_module_steps_sampled count the observations that steps gave to agents, as in RLlib.
num_actions_by_agent counts the actions that agents took, which is what chunks hold. The two differ where an agent
appears later than the reset (one observation more) or ends without a last observation (one less).
"""
