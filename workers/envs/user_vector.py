"""A user's own `VectorEnv` as the sampler's envs: steps are taken together, all else goes env by env."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator
from headrace.workers.envs.lane import close_envs
from headrace.workers.envs.stepping import Outcome
from headrace.workers.envs.vector import EnvVector
from headrace.workers.envs.vector_env import VectorEnv


class SubEnv(gym.Env[Any, Any]):
    """One env of a vector as its lane sees it. Its step is its part, `row`, of a step that all have taken."""

    render_mode = "rgb_array"

    def __init__(self, vector: VectorEnv, index: int) -> None:
        self.observation_space, self.action_space = vector.observation_space, vector.action_space
        self.row: tuple[Any, ...] = ()
        self._vector = vector
        self._index = index

    @property
    def unwrapped(self) -> Any:
        """The user's own env; the whole vector where it shows none."""
        envs = self._vector.get_sub_environments()
        return getattr(envs[self._index], "unwrapped", envs[self._index]) if len(envs) > self._index else self._vector

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._vector.reset_at(self._index, seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self.row and isinstance(self.row[0], Exception):
            raise self.row[0]
        return self.row

    def render(self) -> Any:
        return self._vector.try_render_at(self._index)


class UserVector(EnvVector):
    """Lanes of one `VectorEnv`. One that fails is restarted by `restart_at`, and its neighbours go on."""

    _vector: VectorEnv | None = None

    def _build_env(self, creator: EnvCreator, context: EnvContext) -> gym.Env[Any, Any]:
        if self._vector is None:
            vector = creator(context)
            seen = f"{type(vector).__module__}.{type(vector).__qualname__}"
            if not isinstance(vector, VectorEnv):
                raise EnvContractError("environment", seen, "a headrace VectorEnv")
            self._vector = vector
            if vector.num_envs != len(self.lanes):
                wanted = f"{len(self.lanes)}, as num_envs of the config (context.num_envs)"
                raise EnvContractError(f"num_envs of {seen}", str(vector.num_envs), wanted)
        elif context.recreated:
            self._vector.restart_at(context.vector_index)
        return SubEnv(self._vector, context.vector_index)

    def poll(self) -> Outcome:
        """Step all live lanes at once, and take in what came back."""
        assert self._vector is not None, "envs are built before they are stepped"
        live = {lane.index for lane in self._live}
        actions = [action if i in live else None for i, action in enumerate(self._actions)]
        rows: list[tuple[Any, ...]]
        try:
            answer = self._vector.vector_step(actions)
            lengths = [len(part) for part in answer]
            if lengths != [len(actions)] * 5:
                raise EnvContractError("answer of vector_step", f"parts of {lengths} rows", f"5 of {len(actions)}")
            rows = list(zip(*answer, strict=True))
        except Exception as error:  # noqa: BLE001 - a user's env
            rows = [(error,)] * len(self.lanes)
        for lane, row in zip(self.lanes, rows, strict=True):
            if isinstance(lane.env, SubEnv):
                lane.env.row = row
        return super().poll()

    def try_render_at(self, index: int) -> NDArray[np.uint8] | None:
        """See `EnvDriver`."""
        return super().try_render_at(index) if self._vector is not None else None

    def stop(self) -> None:
        """See `Roster`."""
        super().stop()
        vector, self._vector = self._vector, None
        if vector is not None:
            close_envs([vector], self._config.env_close_timeout_s)
