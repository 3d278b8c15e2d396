"""Random actions among the legal ones: `action_mask` in an observation or info."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.printable import brief
from headrace.schemas.chunks.spaces import Space, Spaces
from headrace.schemas.errors import ConfigError, EnvContractError
from headrace.workers.envs.action_masks import MASK, ActionMask, choices_of
from headrace.workers.envs.actions import RandomActions

log = logging.getLogger(__name__)


class LegalRandomActions:
    """`RandomActions` of the space `action`, limited to the legal actions if the env sends masks.

    `spaces` and `observations` are the env's own, before any connector; rows are those of `observations`. The masks
    apply to the env's actions. They are ignored where `action` has other choices, which a connector maps to the env's.
    """

    def __init__(self, spaces: Spaces, action: Space, observations: Mapping[str, NDArray[Any]]) -> None:
        self._any = RandomActions(action)
        self.noise_size = self._any.noise_size
        self._observed = observations
        self._choices = choices_of(action)
        self._count = sum(choice.size for choice in self._choices)
        self._mask: ActionMask | None = None
        self._refusal: ConfigError | None = None
        """The error for a mask that cannot be obeyed. It waits for the first random action: the module may know how."""
        self.told: dict[int, Any] = {}
        """The mask in the info of each row's newest observation."""
        is_mapped = self._choices != choices_of(spaces.action)
        try:
            self._mask = None if is_mapped else ActionMask.of(spaces)
        except ConfigError as error:
            self._refusal = error
        self._listens = not is_mapped and self._mask is None and self._refusal is None and bool(self._choices)
        self._is_new = True
        """True until an info had a mask."""

    def follow(self, observations: Mapping[str, NDArray[Any]]) -> None:
        """Use other columns from now on, with the same rows and perhaps more after them."""
        self._observed = observations

    def tell(self, row: int, mask: Any) -> None:
        """Set the mask from the info of a row's newest observation. It holds for the next action."""
        if not self._listens:
            return
        if self._is_new:
            self._is_new = False
            log.warning(
                "the env's infos have an %r. It binds random actions alone, because policies do not see infos; put it "
                "into the observation, and they obey it too",
                MASK,
            )
        self.told[row] = mask

    def drop(self, rows: NDArray[np.intp] | None) -> None:
        """Drop what infos told of `rows` (None: all), which act or begin an episode."""
        if not self.told:
            return
        self.told = {} if rows is None else {row: self.told[row] for row in self.told.keys() - set(rows.tolist())}

    @property
    def is_masked(self) -> bool:
        """Return whether masks bind random actions now."""
        return self._mask is not None or bool(self.told)

    def faults(self, rows: NDArray[np.intp]) -> list[tuple[int, EnvContractError]]:
        """Return (position in `rows`, error) for each row whose mask is unsound, or leaves no action."""
        if self._mask is not None:
            return self._mask.faults(self._observed, rows)
        due = f"{self._count} flags of 0 and 1, with a legal action among them"
        return [
            (position, EnvContractError(f"info[{MASK!r}]", brief(self.told[row]), due))
            for position, row in enumerate(rows.tolist())
            if row in self.told and self._read(self.told[row]) is None
        ]

    def _read(self, mask: Any) -> NDArray[np.bool_] | None:
        """Return the flags of a mask in an info; None for a mask that is unsound or leaves no action."""
        try:
            flags = np.concatenate([np.ravel(part) for part in (mask if isinstance(mask, list | tuple) else (mask,))])
            flags_only = flags.shape == (self._count,) and bool(((flags == 0) | (flags == 1)).all())
        except (TypeError, ValueError):
            return None
        starts = np.cumsum([0, *(choice.size for choice in self._choices[:-1])])
        return flags != 0 if flags_only and np.logical_or.reduceat(flags != 0, starts).all() else None

    def _legal(self, rows: int) -> NDArray[np.bool_] | None:
        if self._mask is not None:
            return self._mask.legal(self._observed)
        if not self.told:
            return None
        legal = np.ones((rows, self._count), bool)
        for row, mask in self.told.items():
            flags = self._read(mask)
            legal[row] = True if flags is None else flags
        return legal

    def __call__(self, noise: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Return action columns for noise float32 (rows, noise_size).

        Raises `ConfigError` for observations with a mask that cannot be obeyed.
        """
        if self._refusal is not None:
            raise self._refusal
        columns, legal = self._any(noise), self._legal(len(noise))
        if legal is None:
            return columns
        first = 0
        for choice in self._choices:
            flags = legal[:, first : first + choice.size]
            counts = flags.sum(1)
            place = np.floor(noise[:, choice.number].astype(np.float64) * counts)
            picked = (flags.cumsum(1) > place[:, None]).argmax(1) + choice.start
            column = columns[choice.column].reshape(len(noise), -1)[:, choice.element]
            column[...] = np.where(counts > 0, picked, column)  # a row that does not act may have no legal action
            first += choice.size
        return columns
