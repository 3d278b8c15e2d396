"""The trial of one env before a start: a reset and a step, with a worker's checks of the results.

External envs are not tried, since clients drive their episodes. A user's own vectors and EnvPool's are not tried
either, since their envs are reset in another way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.deploy.trained.policy_spaces import BuiltEnv
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ConfigError, EnvContractError, EnvError, words_of
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.action_masks import MASK
from headrace.workers.envs.actions import RandomActions, to_env_form
from headrace.workers.envs.checks import own_info, take_apart, take_reset_apart
from headrace.workers.envs.context import StepFailedRecreateEnv
from headrace.workers.envs.driver import own_driver
from headrace.workers.envs.error_text import seed_hint
from headrace.workers.envs.failures import name_of
from headrace.workers.envs.lane import EnvSlot
from headrace.workers.envs.native.creators import Seeding, seeding_of
from headrace.workers.envs.observations import NoteOutside, Observations
from headrace.workers.envs.sequential_step import step_all
from headrace.workers.envs.vector_env import VectorEnv
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.masks import LegalRandomActions


class _Trial:
    """The first calls of an env, and how long each took."""

    def __init__(self, config: EnvRunnerConfig) -> None:
        self._config = config
        self.seed = config.max_env_seed // 2 + 1
        """A seed as large as workers' seeds are, of which half are above it."""
        self.took_s: dict[str, float] = {}
        self.tell = partial(own_info, RunnerTotals().note_left_out) if config.infos == "all" else None

    @contextmanager
    def at(self, what: str, envs: int = 1) -> Iterator[None]:
        """Turn an error of the call within into an `EnvError` that names the env and the call.

        A call of `envs` envs that takes longer than a worker allows is such an error too.
        """
        name, began = self._config.env, time.monotonic()
        try:
            yield
        except StepFailedRecreateEnv:
            pass  # a worker rebuilds the env
        except BaseException as error:
            raise_stop(error)
            said = str(error) if isinstance(error, EnvContractError) else words_of(error)
            said += seed_hint(said, self._config.max_env_seed)
            raise EnvError(
                f"env {name!r} failed at its first {what}: {said}; correct the env, or start without this check: "
                "--no-check-env"
            ) from error
        took_s = self.took_s[what] = time.monotonic() - began
        setting = f"env_{what}_timeout_s"
        limit_s = getattr(self._config, setting)
        if took_s > limit_s * envs:
            raise EnvError(
                f"env {name!r} took {took_s:.1f} s for its first {what}, and sampling.{setting} = {limit_s:g} allows "
                "no worker that; raise it, or start without this check: --no-check-env"
            )


def try_env(config: EnvRunnerConfig, built: BuiltEnv) -> Mapping[str, float]:
    """Reset the env once, and step it once with sampled actions. Return the seconds of each call that was made.

    Raises `EnvError` with the fault and its place, or for a call beyond its time limit. An env that asks for a rebuild
    passes.
    """
    trial = _Trial(config)
    env, name = built.env, name_of(config.env)
    note_outside = None if config.strict_bounds else partial(RunnerTotals().note_outside, name)
    if isinstance(env, VectorEnv) or own_driver(env, several_agents=config.is_multi_agent) is not None:
        return trial.took_s
    if config.is_multi_agent:
        _try_agents(trial, env, built.by_agent, note_outside=note_outside)
    elif not isinstance(env, gym.vector.VectorEnv):
        _try_one(trial, env, built.own, note_outside=note_outside)
    elif seeding_of(env) is not Seeding.NONE:
        _try_vector(trial, env, built.own, note_outside=note_outside)
    return trial.took_s


def _try_one(trial: _Trial, env: Any, spaces: Spaces, *, note_outside: NoteOutside | None) -> None:
    seen = Observations(spaces.observation, 1, note_outside=note_outside)
    with trial.at("reset"):
        observation, info = take_reset_apart(env.reset(seed=trial.seed))
        _raise_first(seen.put(None, [observation]))
        if trial.tell is not None:
            trial.tell(info)
    with trial.at("step"):
        action = _sample(spaces, seen, info)
        failures = step_all([EnvSlot(0, env, env.step)], [action], seen, 1, trial.tell).failures
        if failures:
            raise failures[0].error


def _try_vector(trial: _Trial, env: Any, spaces: Spaces, *, note_outside: NoteOutside | None) -> None:
    seen = Observations(spaces.observation, env.num_envs, note_outside=note_outside)
    with trial.at("reset", env.num_envs):
        _raise_first(seen.put_rows(take_reset_apart(env.reset(seed=trial.seed))[0]))
    with trial.at("step", env.num_envs):
        _raise_first(seen.put_rows(_taken_apart(env.step(env.action_space.sample()))))


def _try_agents(trial: _Trial, env: Any, spaces: Mapping[Any, Spaces], *, note_outside: NoteOutside | None) -> None:
    seen = {agent: Observations(own.observation, 1, note_outside=note_outside) for agent, own in spaces.items()}
    with trial.at("reset"):
        observations, infos = take_reset_apart(env.reset(seed=trial.seed))
        _put_all(seen, observations)
    with trial.at("step"):
        actions = {a: _sample(spaces[a], seen[a], infos.get(a)) for a in observations}
        _put_all(seen, _taken_apart(env.step(actions)))


def _put_all(seen: Mapping[Any, Observations], observations: Any) -> None:
    if not isinstance(observations, Mapping):
        raise EnvContractError("observations", f"{observations!r:.80}", "a dict by agent")
    for agent, observation in observations.items():
        if agent not in seen:
            raise EnvContractError("agent", f"{agent!r:.80}", f"one of possible_agents, {list(seen)!r:.200}")
        for _, problem in seen[agent].put(None, [observation]):
            raise EnvContractError(f"{problem.what} of agent {agent!r:.80}", problem.seen, problem.expected)


def _taken_apart(answer: Any) -> Any:
    """Return the observations from the result of `step`. Raises an error for a result that is no 5-tuple."""
    try:
        observations, _, _, _, _ = answer
    except (TypeError, ValueError) as error:
        raise take_apart(answer, error) from error
    return observations


def _raise_first(problems: list[tuple[int, EnvContractError]]) -> None:
    for _, problem in problems:
        raise problem


def _sample(spaces: Spaces, seen: Observations, info: Any) -> Any:
    """Return a random action: a legal one, where what is `seen` or the info has a mask of the legal ones.

    Raises `EnvContractError` for a mask that is unsound or leaves no action.
    """
    random = LegalRandomActions(spaces, spaces.action, seen.columns)
    if isinstance(info, Mapping) and MASK in info:
        random.tell(0, info[MASK])
    _raise_first(random.faults(np.zeros(1, np.intp)))
    noise = np.random.default_rng().random((1, random.noise_size), np.float32)
    try:
        columns = random(noise)
    except ConfigError:  # the policy may know how to obey this mask
        columns = RandomActions(spaces.action)(noise)
    return to_env_form(spaces.action, columns)[0]
