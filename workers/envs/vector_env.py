"""A user's own vector of envs that step better together than one by one: its base class, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.checks import take_apart
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator
from headrace.workers.envs.lane import EnvSlot, close_envs
from headrace.workers.envs.ownership import EnvLife, claim, free
from headrace.workers.envs.rendering import render_at
from headrace.workers.envs.task_reset import task_setter

Answers = tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]


class VectorEnv:
    """`num_envs` envs of one agent. Derive from it, or call `wrap` to make one from envs that exist.

    All envs step together. Each is reset, and restarted after a failure, by itself. `index` None means env 0.
    """

    def __init__(self, observation_space: Any, action_space: Any, num_envs: int) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.num_envs = num_envs

    @staticmethod
    def wrap(
        make_env: Callable[[int], Any] | None = None,
        existing_envs: Sequence[Any] = (),
        num_envs: int = 1,
        observation_space: Any = None,
        action_space: Any = None,
    ) -> VectorEnv:
        """Return a vector of `existing_envs`, filled up to `num_envs` by `make_env(index)`.

        Spaces that are not given are those of env 0. The list given is not changed. Without `make_env` no env that has
        failed can be restarted. Raises `EnvContractError` where the numbers do not fit.
        """
        return _ListedEnvs(make_env, existing_envs, num_envs, observation_space, action_space)

    def vector_reset(
        self, *, seeds: Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """Reset all envs, and return (observations, infos). For your own loops: a runner resets each env alone."""
        given = [None] * self.num_envs if seeds is None else seeds
        answers = [self.reset_at(index, seed=seed, options=options) for index, seed in enumerate(given)]
        return [answer[0] for answer in answers], [answer[1] for answer in answers]

    def reset_at(
        self, index: int | None = None, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset one env, and return (observation, info)."""
        raise self._lacks("reset_at")

    def restart_at(self, index: int | None = None) -> None:
        """Replace one failed env by a new one. The runner calls `reset_at` next."""
        raise self._lacks("restart_at")

    def vector_step(self, actions: Sequence[Any]) -> Answers:
        """Step all envs, and return (observations, rewards, terminateds, truncateds, infos), one of each for every env.

        An action of None is for an env that has failed and waits: do not step it; its answer is not read. If one env
        fails, put its exception in place of its observation. If this method raises, all envs have failed.
        """
        raise self._lacks("vector_step")

    def _lacks(self, method: str) -> NotImplementedError:
        due = "a headrace.VectorEnv has reset_at, restart_at and vector_step"
        return NotImplementedError(f"{type(self).__name__} has no {method}; {due} (gymnasium's: gymnasium.vector)")

    def get_sub_environments(self) -> Sequence[Any]:
        """Return the envs themselves, if the vector has any."""
        return []

    def get_unwrapped(self) -> Sequence[Any]:
        """Return the same as `get_sub_environments`."""
        return self.get_sub_environments()

    def try_render_at(self, index: int | None = None) -> NDArray[np.uint8] | None:
        """Return one env's picture, rgb uint8 (height, width, 3); None if it has none."""
        return None

    def close(self) -> None:
        """Close all envs."""


class _ListedEnvs(VectorEnv):
    def __init__(
        self,
        make_env: Callable[[int], Any] | None,
        existing_envs: Sequence[Any],
        num_envs: int,
        observation_space: Any,
        action_space: Any,
    ) -> None:
        self._make_env = make_env
        self._envs = list(existing_envs)
        given = len(self._envs)
        if given > num_envs or (given < num_envs and make_env is None):
            wanted = f"{num_envs}, as num_envs says" + ("" if given > num_envs else ", or fewer and make_env")
            raise EnvContractError("number of existing_envs", str(given), wanted)
        if make_env is not None:
            self._envs += [make_env(index) for index in range(given, num_envs)]
        self._lives = [EnvLife() for _ in self._envs]
        for index, env in enumerate(self._envs):
            claim(env, self._lives[index], index, recreated=False)
        first = self._envs[0]
        super().__init__(
            first.observation_space if observation_space is None else observation_space,
            first.action_space if action_space is None else action_space,
            num_envs,
        )

    def reset_at(
        self, index: int | None = None, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        answer: tuple[Any, dict[str, Any]] = self._envs[index or 0].reset(seed=seed, options=options)
        return answer

    def restart_at(self, index: int | None = None) -> None:
        if self._make_env is None:
            raise EnvContractError("VectorEnv.wrap", "existing_envs only", "given make_env too, to restart an env")
        place = index or 0
        close_envs([self._envs[place]])
        self._envs[place] = None  # freed before the next one is built, which may need its port or its memory
        free(self._lives[place])
        self._lives[place] = EnvLife()
        env = self._make_env(place)
        claim(env, self._lives[place], place, recreated=True)
        self._envs[place] = env

    def vector_step(self, actions: Sequence[Any]) -> Answers:
        rows = [_step(env, action) for env, action in zip(self._envs, actions, strict=True)]
        observations, rewards, terminateds, truncateds, infos = zip(*rows, strict=True)
        return observations, rewards, terminateds, truncateds, infos

    def get_sub_environments(self) -> Sequence[Any]:
        return self._envs

    def try_render_at(self, index: int | None = None) -> NDArray[np.uint8] | None:
        return render_at(self._envs[index or 0], index or 0)

    def close(self) -> None:
        close_envs(self._envs)
        for life in self._lives:
            life.is_over = True


def _step(env: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
    if action is None:
        return None, 0.0, False, False, {}
    try:
        answer = env.step(action)
    except BaseException as error:  # noqa: BLE001 - a user's env
        raise_stop(error)
        return error, 0.0, True, False, {}
    if not isinstance(answer, tuple) or len(answer) != 5:
        return take_apart(answer, ValueError()), 0.0, True, False, {}
    return answer


class SubEnv(gym.Env[Any, Any]):
    """One env of a vector, as its lane sees it. Its step returns `row`, the env's part of a step of all envs."""

    render_mode = "rgb_array"

    def __init__(self, vector: VectorEnv, index: int) -> None:
        self.observation_space, self.action_space = vector.observation_space, vector.action_space
        self.row: tuple[Any, ...] = ()
        self._vector = vector
        self._index = index

    @property
    def unwrapped(self) -> Any:
        """The user's own env, or the whole vector if it does not show its envs."""
        envs = self._vector.get_sub_environments()
        return getattr(envs[self._index], "unwrapped", envs[self._index]) if len(envs) > self._index else self._vector

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset this env only. A task in `options` goes to its own `set_task`, if the vector shows such an env."""
        envs = self._vector.get_sub_environments() if options else ()
        if len(envs) > self._index and (set_task := task_setter(envs[self._index])) is not None:
            set_task(options)
            options = None
        return self._vector.reset_at(self._index, seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Return `row`, or raise the exception in it."""
        if self.row and isinstance(self.row[0], BaseException):
            raise self.row[0]
        return self.row

    def render(self) -> Any:
        """Return this env's picture."""
        return self._vector.try_render_at(self._index)


class UserVectorEnvs:
    """The envs of one `VectorEnv`, for `InlineEnvs`. An env that fails is restarted by `restart_at`."""

    def __init__(self) -> None:
        self._vector: VectorEnv | None = None

    def make_env(self, creator: EnvCreator, context: EnvContext) -> gym.Env[Any, Any]:
        """Return one env of the vector, which the first call creates. Raises `EnvContractError` for no such vector."""
        if self._vector is None:
            self._vector = checked_vector(creator(context))
            if self._vector.num_envs != context.num_envs:
                wanted = f"{context.num_envs}, as num_envs of the config (context.num_envs)"
                raise EnvContractError(f"num_envs of {_name(self._vector)}", str(self._vector.num_envs), wanted)
        elif context.recreated:
            self._vector.restart_at(context.vector_index)
        return SubEnv(self._vector, context.vector_index)

    def before_step(self, slots: Sequence[EnvSlot], actions: Sequence[Any]) -> None:
        """Step all envs together. Give each of `slots` its part of the answer, or the error of all."""
        assert self._vector is not None, "envs are built before they are stepped"
        live = {slot.index for slot in slots}
        width = len(actions)
        rows: list[tuple[Any, ...]]
        try:
            answer = self._vector.vector_step([action if i in live else None for i, action in enumerate(actions)])
            lengths = [len(part) for part in answer]
            if lengths != [width] * 5:
                raise EnvContractError("answer of vector_step", f"parts of {lengths} rows", f"5 of {width}")
            rows = list(zip(*answer, strict=True))
        except BaseException as error:  # noqa: BLE001 - a user's env
            raise_stop(error)
            rows = [(error,)] * width
        for slot in slots:
            if isinstance(slot.env, SubEnv):
                slot.env.row = rows[slot.index]

    def close(self) -> None:
        """Close the vector, within 5 s."""
        vector, self._vector = self._vector, None
        close_envs([vector])


def checked_vector(vector: Any) -> VectorEnv:
    """Return `vector`; raise `EnvContractError` unless it is a `VectorEnv`."""
    if not isinstance(vector, VectorEnv):
        raise EnvContractError("environment", _name(vector), "a headrace VectorEnv")
    return vector


def _name(vector: Any) -> str:
    return f"{type(vector).__module__}.{type(vector).__qualname__}"
