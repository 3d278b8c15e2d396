"""Random actions among the legal ones: `action_mask` in an observation or info, a flag for each Discrete action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Discrete, Space, Spaces
from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.actions import RandomActions
from headrace.workers.modules.action_masks import MASK, has_action_mask

_COLUMN = f"obs/{MASK}"


class LegalRandomActions:
    """`RandomActions` of the space `action`, limited to the legal actions if the env sends masks.

    `spaces` and `observations` are the env's own, before any connector; rows are those of `observations`. The masks
    apply to the env's actions. They are ignored where `action` is another space, which a connector maps to the env's.
    """

    def __init__(self, spaces: Spaces, action: Space, observations: Mapping[str, NDArray[Any]]) -> None:
        self._any = RandomActions(action)
        self.noise_size = self._any.noise_size
        self._discrete = action if isinstance(action, Discrete) and action == spaces.action else None
        self._is_masked = self._discrete is not None and has_action_mask(spaces)
        self._told: NDArray[np.bool_] | None = None
        self.follow(observations)

    def follow(self, observations: Mapping[str, NDArray[Any]]) -> None:
        """Use other columns from now on, with the same rows and perhaps more after them."""
        self._observed = observations[_COLUMN] if self._is_masked else None
        self._width = len(next(iter(observations.values())))
        if self._told is not None:
            more = np.ones((self._width - len(self._told), self._told.shape[1]), bool)
            self._told = np.concatenate((self._told, more))

    def tell(self, row: int, mask: Any) -> None:
        """Set the mask from the info of a seat's newest observation. It holds for the next action.

        Raises `EnvContractError` for a mask of another size or kind.
        """
        if self._discrete is None:
            return
        array = np.asarray(mask)
        if array.shape != (self._discrete.n,) or array.dtype.kind not in "biuf":
            raise EnvContractError("action_mask in info", f"{mask!r:.80}", f"{self._discrete.n} flags")
        if self._told is None:
            self._told = np.ones((self._width, self._discrete.n), bool)
        self._told[row] = array != 0

    def forget(self, row: int) -> None:
        """Drop the row's mask, because another episode begins there."""
        if self._told is not None:
            self._told[row] = True

    def __call__(self, noise: NDArray[np.float32], acting: NDArray[np.intp] | None) -> dict[str, NDArray[Any]]:
        """Return action columns for noise float32 (rows, noise_size), and drop the masks of `acting` (None: all)."""
        columns = self._any(noise)
        legal = self._told if self._observed is None else self._observed != 0
        if self._discrete is None or legal is None:
            return columns
        counts = legal.sum(1)
        choice = np.floor(noise[:, 0].astype(np.float64) * counts)
        picked = (legal.cumsum(1) > choice[:, None]).argmax(1) + self._discrete.start
        actions = np.where(counts > 0, picked, columns["actions"])  # if no action is legal, keep the random one
        columns["actions"] = actions.astype(columns["actions"].dtype)
        if self._told is not None:
            self._told[slice(None) if acting is None else acting] = True
        return columns
