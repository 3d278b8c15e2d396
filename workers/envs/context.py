"""The facts that an env's creator gets, and an env's request to be rebuilt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.workers.envs.ownership import EnvLife


def _own(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {key: _own(part) for key, part in value.items()}
    return kind(map(_own, value)) if kind in (list, tuple, set) else value


class EnvContext(dict[str, Any]):
    """A copy of the user's `env_config`, with attributes that say which env is built, as for a port of its own.

    Dicts, lists and sets in it are copies too. Arrays and other objects are shared.

    `vector_index` is the env's place in its runner, from 0. `num_envs` is the runner's number of envs; a creator of a
    whole vector makes one of that size. `recreated`: the env replaces a failed one. `seed` is for envs that are seeded
    when they are made: it follows from the run's seed, and differs each time. Env i of a vector may take seed + i.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any],
        *,
        worker_index: int = 0,
        num_workers: int = 1,
        vector_index: int = 0,
        num_envs: int = 1,
        remote: bool = False,
        recreated: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__({key: _own(value) for key, value in env_config.items()})
        self.worker_index = worker_index
        self.num_workers = num_workers
        self.vector_index = vector_index
        self.num_envs = num_envs
        self.remote = remote
        self.recreated = recreated
        self.seed = seed
        self.life = EnvLife()
        """The lane's ownership of the env, for Headrace only."""

    def at(self, vector_index: int) -> EnvContext:
        """Return the context of another env of the runner."""
        other = self.with_config(self)
        other.vector_index = vector_index
        other.seed = None if self.seed is None else self.seed + vector_index - self.vector_index
        return other

    def with_config(self, env_config: Mapping[str, Any]) -> EnvContext:
        """Return a context with another `env_config` for the same place."""
        other = EnvContext(env_config)
        vars(other).update(vars(self))
        return other

    @property
    def recreated_worker(self) -> bool:
        """RLlib's name for `recreated`."""
        return self.recreated


class StepFailedRecreateEnv(Exception):
    """Raised by an env from `step` or `reset` to be rebuilt without an error in the log."""
