"""The trial of one env before a start: a reset and a step, with a worker's checks of the results.

External envs are not tried, since clients drive their episodes. A user's own vectors and EnvPool's are not tried
either, since their envs are reset in another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np

from headrace.deploy.run.policy_spaces import BuiltEnv
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import EnvContractError, EnvError
from headrace.workers.agents.env import gym_spaces_of
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.checks import take_apart, take_reset_apart
from headrace.workers.envs.context import StepFailedRecreateEnv
from headrace.workers.envs.error_text import message_of, seed_hint
from headrace.workers.envs.inline import EnvSlot
from headrace.workers.envs.native.kinds import Seeding, seeding_of
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.sequential_step import step_all
from headrace.workers.envs.vector_env import VectorEnv
from headrace.workers.external.agents_env import ExternalMultiAgentEnv
from headrace.workers.external.env import ExternalEnv


def try_env(config: EnvRunnerConfig, built: BuiltEnv) -> None:
    """Reset the env once, and step it once with sampled actions. Raises `EnvError` with the fault and its place.

    An env that asks for a rebuild passes.
    """
    env, check_bounds = built.env, not config.disable_env_checking
    if isinstance(env, ExternalEnv | ExternalMultiAgentEnv | VectorEnv):
        return
    if config.is_multi_agent:
        _try_agents(config, env, built.by_agent, check_bounds=check_bounds)
    elif not isinstance(env, gym.vector.VectorEnv):
        _try_one(config, env, built.own, check_bounds=check_bounds)
    elif seeding_of(env) is not Seeding.NONE:
        _try_vector(config, env, built.own, check_bounds=check_bounds)


def _seed(config: EnvRunnerConfig) -> int:
    """Return a seed as large as workers' seeds are, of which half are above it."""
    return config.max_env_seed // 2 + 1


def _try_one(config: EnvRunnerConfig, env: Any, spaces: Spaces, *, check_bounds: bool) -> None:
    seen = Observations(spaces.observation, 1, check_bounds=check_bounds)
    with _failing_at(config, "reset"):
        observation, info = take_reset_apart(env.reset(seed=_seed(config)))
        _raise_first(seen.put(None, [observation]))
    with _failing_at(config, "step"):
        action = _sample(env.action_space, observation, info)
        failures = step_all([EnvSlot(0, env, env.step)], [action], seen, 1).failures
        if failures:
            raise failures[0].error


def _try_vector(config: EnvRunnerConfig, env: Any, spaces: Spaces, *, check_bounds: bool) -> None:
    seen = Observations(spaces.observation, env.num_envs, check_bounds=check_bounds)
    with _failing_at(config, "reset"):
        _raise_first(seen.put_rows(take_reset_apart(env.reset(seed=_seed(config)))[0]))
    with _failing_at(config, "step"):
        _raise_first(seen.put_rows(_taken_apart(env.step(env.action_space.sample()))))


def _try_agents(config: EnvRunnerConfig, env: Any, spaces: Mapping[Any, Spaces], *, check_bounds: bool) -> None:
    seen = {agent: Observations(own.observation, 1, check_bounds=check_bounds) for agent, own in spaces.items()}
    gym_spaces = gym_spaces_of(env)
    with _failing_at(config, "reset"):
        observations, infos = take_reset_apart(env.reset(seed=_seed(config)))
        _put_all(seen, observations)
    with _failing_at(config, "step"):
        actions = {a: _sample(gym_spaces[a][1], own, infos.get(a)) for a, own in observations.items()}
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


def _sample(space: Any, observation: Any, info: Any) -> Any:
    """Return a random action: a legal one, where the observation or the info has a mask of the legal ones."""
    masks = (part.get("action_mask") for part in (observation, info) if isinstance(part, Mapping))
    mask = next((mask for mask in masks if mask is not None), None)
    if mask is not None and isinstance(space, gym.spaces.Discrete):
        return space.sample(mask=np.asarray(mask, np.int8))
    return space.sample()


@contextmanager
def _failing_at(config: EnvRunnerConfig, what: str) -> Iterator[None]:
    """Turn an error of the env within into an `EnvError` that names the env and the call."""
    try:
        yield
    except StepFailedRecreateEnv:
        return
    except Exception as error:
        said = str(error) if isinstance(error, EnvContractError) else f"{type(error).__name__}: {message_of(error)}"
        said += seed_hint(said, config.max_env_seed)
        raise EnvError(
            f"env {config.env!r} failed at its first {what}: {said}; correct the env, or start without this check: "
            "--no-check-env"
        ) from error
