"""What every env runner offers, whatever it steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from headrace.schemas.chunk import EpisodeChunk
from headrace.schemas.errors import ConfigError


class SampleSizeError(ConfigError, AssertionError):
    """`sample` was asked for a size that makes no sense."""


class EnvRunner(ABC):
    """Steps environments with a policy and gives episode chunks. One thread at a time; usable in a `with` block."""

    @abstractmethod
    def make_env(self) -> None:
        """Build all envs anew from the config, closing what was there. Open episodes are over."""

    @abstractmethod
    def make_module(self) -> None:
        """Build the policy anew from the config."""

    @abstractmethod
    def sample(self, **kwargs: Any) -> Sequence[EpisodeChunk]:
        """Step and give what was lived through."""

    @abstractmethod
    def get_metrics(self) -> dict[str, Any]:
        """Steps and completed episodes since the last call, and lifetime sums."""

    @abstractmethod
    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Module id -> (observation space, action space), as the env has them."""

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Weights with their version, and lifetime counters."""

    @abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over what of `state` is there."""

    @abstractmethod
    def assert_healthy(self) -> None:
        """Raise AssertionError unless construction went through to its end."""

    @abstractmethod
    def stop(self) -> None:
        """Close all envs. May be called twice, and on a runner that has none."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def check_size(num_timesteps: int | None, num_episodes: int | None) -> None:
    """Refuse two sizes at once, and negative ones."""
    if num_timesteps is not None and num_episodes is not None:
        raise SampleSizeError(
            f"num_timesteps = {num_timesteps} and num_episodes = {num_episodes}: give only one of them"
        )
    for name, size in (("num_timesteps", num_timesteps), ("num_episodes", num_episodes)):
        if size is not None and size < 0:
            raise SampleSizeError(f"{name} = {size} is negative; give 0 or more")
