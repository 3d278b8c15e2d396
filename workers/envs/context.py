"""What an env and its creator are told, and what an env may tell back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class EnvContext(dict[str, Any]):
    """The user's `env_config`, which also knows for whom the env is built, so each may get a port or a map of its own.

    `vector_index` is the env's place in its runner, from 0, and `num_envs` how many the runner has: whoever creates a
    whole vector makes one of that many. `recreated` says it replaces one that failed.
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
    ) -> None:
        super().__init__(env_config)
        self.worker_index = worker_index
        self.num_workers = num_workers
        self.vector_index = vector_index
        self.num_envs = num_envs
        self.remote = remote
        self.recreated = recreated

    def at(self, vector_index: int) -> EnvContext:
        """The same for another env of the runner."""
        return EnvContext(
            self,
            worker_index=self.worker_index,
            num_workers=self.num_workers,
            vector_index=vector_index,
            num_envs=self.num_envs,
            remote=self.remote,
            recreated=self.recreated,
        )

    @property
    def recreated_worker(self) -> bool:
        """RLlib's name for `recreated`."""
        return self.recreated


class StepFailedRecreateEnv(Exception):
    """Raise it from `step` or `reset` to have the env rebuilt without an error in the log."""
