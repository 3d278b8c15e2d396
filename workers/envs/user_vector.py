"""A user's own `VectorEnv` as a source of envs. It steps all envs together; all other calls are env by env."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator
from headrace.workers.envs.inline import EnvSlot
from headrace.workers.envs.lane import close_envs
from headrace.workers.envs.vector_env import VectorEnv


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
        """Reset this env only."""
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
