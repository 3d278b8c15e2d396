"""What a vector asks of the pool its envs live in, wherever that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.spaces import Spaces
from headrace.workers.envs.process.answers import Answers


class EnvPool(Protocol):
    """Lanes whose envs are elsewhere; `EnvProcessPool` says what each name stands for."""

    width: int
    spaces: Spaces

    @property
    def observations(self) -> dict[str, NDArray[Any]]: ...
    @property
    def rewards(self) -> NDArray[np.float64]: ...
    def has_env(self, lane: int) -> bool: ...
    def send_actions(
        self,
        lanes: Sequence[int] | None,
        columns: Mapping[str, NDArray[Any]],
        root: str = ...,
        next_seeds: Mapping[int, int] | None = ...,
    ) -> None: ...
    def try_reset(self, lane: int, seed: int) -> None: ...
    def try_restart(self, lane: int) -> None: ...
    def begin(self, lanes: Sequence[int]) -> None: ...
    def poll(self, timeout_s: float = ..., batch_wait_s: float = ...) -> Answers: ...
    def stop(self) -> None: ...
