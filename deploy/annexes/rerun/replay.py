"""The repetition of a failed episode: an env built as the worker's was gets the same seed, task and actions.

Each reward and observation is compared with what the worker saw. An env that gives others is not deterministic, or
keeps something from one episode to the next.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from headrace.deploy.annexes.rerun.agents_replay import open_agents, play_agents
from headrace.deploy.annexes.rerun.repeated import Repeated, slow_calls_said
from headrace.deploy.annexes.rerun.stop_before import stopping_before
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import column_dtype, leaf_shape, leaves
from headrace.schemas.chunks.task import Task
from headrace.schemas.errors import ConfigError, EnvError, RunDirError
from headrace.workers.agents.vector import MultiAgentVector
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import find_creator
from headrace.workers.envs.driver import LaneDriver, Pace, own_driver
from headrace.workers.envs.failures import in_its_env
from headrace.workers.envs.inline import InlineEnvs
from headrace.workers.envs.lane import AnyEpisode, Lane, close_envs
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.process.pool import EnvProcessPool
from headrace.workers.envs.vector import EnvVector
from headrace.workers.envs.vector_env import UserVectorEnvs, VectorEnv
from headrace.workers.metrics.call_mark import CallMark
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.randomness.seeds import SeedTree
from headrace.workers.reruns.episode_trail import digests
from headrace.workers.reruns.failure_files import FailureFacts, KeptFailure
from headrace.workers.sampling.opening import first_env

log = logging.getLogger("headrace.deploy")

_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_OF_A_PROCESS = "EnvHangError", "EnvCrashError"
"""Errors whose message has the env's index and process."""


Debug = Callable[[Repeated, BaseException], None]
"""Called with an error of the env, or with Ctrl-C in a call of it, before the env is closed."""


Watch = Callable[[LaneDriver, int], None]
"""Called with the envs and the lane after the reset and after each step."""


def repeat(
    config: EnvRunnerConfig,
    failure: KeptFailure,
    calls: CallMark,
    debug: Debug | None = None,
    watch: Watch = lambda envs, lane: None,
    *,
    apart: bool = True,
) -> Repeated:
    """Repeat the episode, and return what came of it. With `debug`, or not `apart`, the env is in this process.

    With `debug` it also stops before a call from which the worker's env did not return. Every 10 s it logs which call
    of the env has not returned.

    Raises `ConfigError` for a failure that cannot be repeated, and `RunDirError` for steps of another env.
    """
    facts, repeated = failure.facts, Repeated()
    if facts.problem:
        raise ConfigError(f"failure {failure.name} cannot be repeated: {facts.problem}")
    placement = "inline" if debug is not None or not apart or config.env_placement == "inline" else "process"
    told = {"num_envs": 1, "env_placement": placement, "callbacks": [], "gym_env_vectorize_mode": None}
    config = config.model_copy(update=told)
    try:
        with slow_calls_said(repeated) as quiet:
            if debug is not None and facts.error in _OF_A_PROCESS:
                creator = stopping_before(find_creator(config.env), facts, quiet.set)
                config = config.model_copy(update={"env": creator})
            with _open(config, facts, calls) as (envs, table, lane):
                raised: BaseException | None
                try:
                    _repeat_in(envs, table, lane, failure, repeated, watch)
                    raised = repeated.error
                except KeyboardInterrupt as error:
                    raised = error
                quiet.set()
                if debug is not None and raised is not None:
                    debug(repeated, raised)
                if repeated.error is None and raised is not None:
                    raise raised
    except KeyboardInterrupt:
        log.warning("interrupted at %s", repeated.at)
        raise
    except EnvError as error:
        if repeated.at != "construction":
            raise
        repeated.error = error.__cause__ or error
    return repeated


def is_same(facts: FailureFacts, error: BaseException) -> bool:
    """Return whether `error` is the one that the worker saw, apart from addresses and ids of processes."""
    kind, message = in_its_env(error)
    return (kind, _plain(kind, message)) == (facts.error, _plain(facts.error, facts.message))


def _plain(kind: str, message: str) -> str:
    return re.sub(r"\d+", "#", message) if kind in _OF_A_PROCESS else _ADDRESS.sub("#", message)


class _Table(LaneTable):
    """The table of an env that is built and reset as that of a failure. `whole`: with all lanes of its vector."""

    def __init__(self, config: EnvRunnerConfig, facts: FailureFacts, calls: CallMark, *, whole: bool) -> None:
        if whole:
            config = config.model_copy(update={"num_envs": facts.num_envs})
        super().__init__(config, facts.worker_index, SeedTree(0, 0, 0, config.num_envs), RunnerTotals(calls=calls))
        self._facts, self._whole = facts, whole

    def new_context(self, index: int, *, recreated: bool = False) -> EnvContext:
        facts = self._facts
        own, first = facts.making_seeds
        context = self.contexts[index] = EnvContext(
            self.config.env_config,
            worker_index=facts.worker_index,
            num_workers=facts.num_workers,
            vector_index=index if self._whole else facts.lane,
            num_envs=facts.num_envs,
            recreated=facts.recreated and not self._whole,
            seed=first if self._whole else own,
        )
        return context

    def create_episode(self, lane: Lane, kind: type[AnyEpisode], draw: Any = None) -> AnyEpisode:
        task, episode = self._facts.task, lane.create_episode(self._facts.seed, kind)
        episode.task = Task(*task) if task is not None else None
        return episode


@contextmanager
def _open(
    config: EnvRunnerConfig, facts: FailureFacts, calls: CallMark
) -> Iterator[tuple[EnvVector | MultiAgentVector, LaneTable, int]]:
    """Build the env. Yield its vector, the table, and its lane there."""
    table, lane = _Table(config, facts, calls, whole=False), 0
    told = {"num_envs": facts.num_envs, "first_index": facts.lane}

    def open_process(own: LaneTable) -> EnvProcessPool:
        return EnvProcessPool(own.config, own.worker_index, own.making_seed, **told)

    if config.is_multi_agent:
        with open_agents(table, open_process) as agents:
            yield agents, table, 0
        return
    if config.env_placement == "process":
        envs = EnvVector(table, open_process, Pace.LOCK_STEP)
    else:
        first, vector = first_env(table), None
        if isinstance(first, gym.vector.VectorEnv) or own_driver(first) is not None:
            kind = "a native vector, whose envs step together" if own_driver(first) is None else "driven by its clients"
            raise ConfigError(f"the env is {kind}, so one episode cannot be repeated alone", key="sampling.env")
        if isinstance(first, VectorEnv):  # it is built whole, and its other envs are not stepped
            close_envs([first])
            table, lane, vector = _Table(config, facts, calls, whole=True), facts.lane, UserVectorEnvs()
            first = first_env(table)
        built = [first]
        envs = EnvVector(table, lambda own: InlineEnvs(own, vector, built.pop()), Pace.LOCK_STEP)
    envs.on_episode_created = lambda *_: None  # so that no env is reset in the step that ends its episode
    try:
        yield envs, table, lane
    finally:
        envs.stop()


def _repeat_in(
    envs: EnvVector | MultiAgentVector,
    table: LaneTable,
    lane: int,
    failure: KeptFailure,
    repeated: Repeated,
    watch: Watch,
) -> None:
    """Reset the env, and take its steps."""
    driver: LaneDriver = envs if isinstance(envs, EnvVector) else envs.envs
    repeated.at = "reset"
    driver.try_reset([lane])
    if table.failed:
        repeated.error = table.failed[0].error
        return
    watch(driver, lane)
    if isinstance(envs, EnvVector):
        _play(envs, lane, failure, repeated, watch)
    else:
        play_agents(envs, failure, repeated, watch)


def _play(envs: EnvVector, lane: int, failure: KeptFailure, repeated: Repeated, watch: Watch) -> None:
    """Take the steps of the failure, until the env fails or ends the episode."""
    steps, rewards = failure.facts.steps, failure.arrays.get("rewards")
    actions = _actions(envs, failure)
    known = {name: column for name, column in failure.arrays.items() if name.partition("/")[0] == "obs"}
    width = len(envs.lanes)
    for step in range(steps):
        _compare(envs, lane, known, step - steps, repeated)
        repeated.at = f"step {step + 1}"
        envs.send_actions({name: np.repeat(column[step : step + 1], width, 0) for name, column in actions.items()})
        outcome = envs.poll()
        if outcome.failures:
            repeated.error = outcome.failures[0].error
            return
        watch(envs, lane)
        if step == steps - 1:
            repeated.end = dict(outcome.ended).get(lane, ChunkEnd.ONGOING)
        elif outcome.ended:
            repeated.note(f"the episode ended, {outcome.ended[0][1].name.lower()}")
            return
        elif rewards is not None and outcome.rewards[0].tobytes() != rewards[step].tobytes():
            repeated.note(f"reward {outcome.rewards[0]}, and the worker got {rewards[step]}")


def _compare(envs: EnvVector, lane: int, known: dict[str, NDArray[Any]], place: int, repeated: Repeated) -> None:
    """Note the first leaf of the observation that is not the worker's, `place` observations from the end."""
    for name, column in known.items():
        seen = envs.observations.columns.get(name)
        if seen is None or -place > len(column):
            continue
        if digests(seen[lane : lane + 1])[0] != column[place]:
            repeated.note(f"observation {name.partition('/')[2] or name}: {seen[lane]!s:.60}")


def _actions(envs: EnvVector, failure: KeptFailure) -> dict[str, NDArray[Any]]:
    """Return the actions of the failure. Raises `RunDirError` if they are not of the env's action space."""
    wanted = {name: (leaf_shape(leaf), column_dtype(leaf)) for name, leaf in leaves(envs.spaces.action, "actions")}
    found = {name: column for name, column in failure.arrays.items() if name.partition("/")[0] == "actions"}
    rows = failure.facts.steps
    fits = found.keys() == wanted.keys() or not rows
    if not fits or any(column.shape != (rows, *wanted[name][0]) for name, column in found.items()):
        seen = {name: column.shape for name, column in found.items()}
        reason = f"its actions are {seen!r:.200}, and those of the env {wanted!r:.200}"
        raise RunDirError(failure.name, reason, sentence=f"{failure.name} is of another env: {reason}")
    return {name: column.astype(wanted[name][1], casting="same_kind") for name, column in found.items()}
