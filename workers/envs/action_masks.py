"""Action masks: the entry "action_mask" of an observation, with a flag for each choice that an action makes.

A flag is 1 where the choice is legal, and 0 where it is not. An action space has the choices of its discrete leaves,
side by side in the order of the space; a Box has none. `ActionMask.of` says which of them the flags belong to:

    Discrete(n)                       n flags
    MultiDiscrete, MultiBinary        the flags of all elements, one after another; or a Tuple of masks, one an element
    Dict, Tuple                       the flags of all parts, one after another; or masks nested as the parts are
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import (
    Box,
    Dict,
    Discrete,
    Leaf,
    MultiBinary,
    MultiDiscrete,
    Space,
    Spaces,
    Tuple,
    box_bounds,
    leaf_size,
    leaf_values,
    leaves,
)
from headrace.schemas.errors import ConfigError, EnvContractError

if TYPE_CHECKING:  # processes of envs import this file too, and start faster without it
    import torch

MASK = "action_mask"
_DUE = (
    "a mask has flags of 0 and 1 (MultiBinary(n), MultiDiscrete([2] * n) or Box(0, 1, (n,))), one for each choice of "
    "the action, in its order. Change the mask in the env, or give it another name, so that it binds nothing"
)


def masks_of(info: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what an info has of masks, also if it holds the infos of several agents."""
    return {
        key: part if key == MASK else {MASK: part[MASK]}
        for key, part in info.items()
        if key == MASK or (isinstance(part, dict) and MASK in part)
    }


def is_mask(column: str) -> bool:
    """Return whether an observation column is a mask, or a part of one. Connectors leave those unchanged."""
    return MASK in column.split("/")


def find_mask(space: Space, root: str = "obs") -> tuple[str, Space] | None:
    """Return the column name and the space of the mask below `space`. Raises `ConfigError` if there are several."""
    found = dict(_masks(space, root))
    if len(found) > 1:
        raise ConfigError(f"the observation has {len(found)} masks: {', '.join(found)}; keep one '{MASK}'", key="env")
    return next(iter(found.items()), None)


def _masks(space: Space, name: str) -> Iterator[tuple[str, Space]]:
    if is_mask(name):
        yield name, space
    elif isinstance(space, Dict | Tuple):
        parts = space.spaces.items() if isinstance(space, Dict) else enumerate(space.spaces)
        for key, sub in parts:
            yield from _masks(sub, f"{name}/{key}")


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice among `size` numbers from `start` on: an element of the action column `column`.

    `number` is its place among all elements of the action, those of a Box too.
    """

    column: str
    element: int
    size: int
    start: int
    number: int


def choices_of(action: Space) -> list[Choice]:
    """Return the choices of an action space, in its order."""
    choices: list[Choice] = []
    number = 0
    for name, leaf in leaves(action, "actions"):
        for element, (size, start) in enumerate(_ranges(leaf)):
            choices.append(Choice(name, element, size, start, number + element))
        number += leaf_size(leaf)
    return choices


def _ranges(leaf: Leaf) -> list[tuple[int, int]]:
    if isinstance(leaf, Discrete):
        return [(leaf.n, leaf.start)]
    if isinstance(leaf, MultiDiscrete):
        return list(zip(leaf.flat_nvec, leaf.flat_start, strict=True))
    return [(2, 0)] * leaf_size(leaf) if isinstance(leaf, MultiBinary) else []


class ActionMask:
    """The mask of an observation space, and the choices that it binds."""

    def __init__(self, name: str, spaces: Spaces, flags: Sequence[tuple[str, int, int]]) -> None:
        self.title = "observation" + "".join(f"[{key!r}]" for key in name.split("/")[1:])
        self._space = spaces.observation
        self._columns = [column for column, _, _ in flags]
        names = [column for column, _ in leaves(spaces.observation, "obs")]
        self._leaves = [names.index(column) for column in self._columns]
        sizes = [choice.size for choice in choices_of(spaces.action)]
        places = np.concatenate([np.arange(first, last) for _, first, last in flags])
        self._choices = np.cumsum([0, *sizes[:-1]])
        """The place of each choice's first flag among the flags of all choices."""
        self._flag_of = np.full(sum(sizes), len(places))
        """The flag of each number that may be chosen; one beyond the last where the mask has none."""
        self._flag_of[places] = np.arange(len(places))
        self._is_whole = len(places) == sum(sizes)
        self._there: torch.Tensor | None = None
        """A copy of `_flag_of` for passes on another device."""

    @classmethod
    def of(cls, spaces: Spaces) -> ActionMask | None:
        """Return the mask of these spaces, or None without one. Raises `ConfigError` for one that cannot be obeyed."""
        found = find_mask(spaces.observation)
        if found is None:
            return None
        name, space = found
        try:
            return cls(name, spaces, list(_fit(space, spaces.action, name, 0)))
        except ValueError as error:
            raise ConfigError(
                f"the mask {name!r} cannot be obeyed: {error}. The action space is {spaces.action!r:.200}; {_DUE}",
                key="env",
            ) from None

    def legal(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Return bool (rows, n): for each number of each choice, whether it is legal."""
        flags = self._flags(columns) != 0
        return flags if self._is_whole else np.pad(flags, ((0, 0), (0, 1)), constant_values=True)[:, self._flag_of]

    def _flags(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        parts = [columns[name].reshape(len(columns[name]), -1) for name in self._columns]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def illegal(self, obs: Any) -> torch.Tensor:
        """Return bool (rows, n) for nested observations: for each number of each choice, whether it is illegal."""
        import torch

        values = leaf_values(self._space, obs)
        parts = [values[place].flatten(1) == 0 for place in self._leaves]
        flags = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if self._is_whole:
            return flags
        if flags.is_cpu or not torch.is_inference_mode_enabled():
            flag_of = torch.from_numpy(self._flag_of).to(flags.device)
        elif self._there is None or self._there.device != flags.device:
            flag_of = self._there = torch.from_numpy(self._flag_of).to(flags.device)
        else:
            flag_of = self._there
        return torch.cat((flags, torch.zeros_like(flags[:, :1])), 1)[:, flag_of]

    def lift(self, columns: Mapping[str, NDArray[Any]], acting: NDArray[np.intp]) -> None:
        """Make all actions legal in rows that do not act and leave none. A module may fail at such rows."""
        able = np.logical_and.reduce(np.logical_or.reduceat(self.legal(columns), self._choices, 1), 1)
        able[acting] = True
        for name in self._columns:
            columns[name][~able] = 1

    def faults(self, columns: Mapping[str, NDArray[Any]], rows: NDArray[np.intp]) -> list[tuple[int, EnvContractError]]:
        """Return (position in `rows`, error) for each row that may not act: flags other than 0 and 1, or none set."""
        if not len(rows):
            return []
        own = {name: columns[name][rows] for name in self._columns}
        flags = self._flags(own)
        odd = (flags != 0) & (flags != 1)
        legal = self.legal(own)
        able = np.logical_or.reduceat(legal, self._choices, 1)
        if able.all() and not odd.any():
            return []
        faults = []
        for position in np.flatnonzero(odd.any(1) | ~able.all(1)).tolist():
            if odd[position].any():
                place = int(odd[position].argmax())
                error = EnvContractError(self.title, f"{flags[position, place]} at flag {place}", "flags of 0 and 1")
            else:
                where = "all flags 0" + (f" for choice {able[position].argmin()}" if able.shape[1] > 1 else "")
                error = EnvContractError(self.title, where, "1 for at least one action")
            faults.append((position, error))
        return faults


def _fit(mask: Space, action: Space, name: str, first: int) -> Iterator[tuple[str, int, int]]:
    """Yield (column, first flag, last flag + 1) for each leaf of a mask, among the flags of the whole action.

    Raises `ValueError` for a mask of another form.
    """
    sizes = [choice.size for choice in choices_of(action)]
    if isinstance(mask, Dict) and isinstance(action, Dict) and set() < {*mask.spaces} <= {*action.spaces}:
        for key, part in action.spaces.items():
            if key in mask.spaces:
                yield from _fit(mask.spaces[key], part, f"{name}/{key}", first)
            first += sum(choice.size for choice in choices_of(part))
    elif isinstance(mask, Tuple) and isinstance(action, Tuple) and len(mask.spaces) == len(action.spaces):
        for index, (sub, part) in enumerate(zip(mask.spaces, action.spaces, strict=True)):
            yield from _fit(sub, part, f"{name}/{index}", first)
            first += sum(choice.size for choice in choices_of(part))
    elif isinstance(mask, Tuple) and isinstance(action, MultiDiscrete) and len(mask.spaces) == len(sizes):
        for index, (sub, size) in enumerate(zip(mask.spaces, sizes, strict=True)):
            yield from _fit(sub, Discrete(n=size), f"{name}/{index}", first)
            first += size
    elif isinstance(mask, Dict | Tuple):
        raise ValueError(f"it is {mask!r:.200}, which is not nested as the action is")
    else:
        _check_flags(mask, action, sizes)
        yield name, first, first + sum(sizes)


def _check_flags(mask: Leaf, action: Space, sizes: Sequence[int]) -> None:
    if not sizes:
        raise ValueError("it is for an action without choices")
    shapes: list[tuple[int, ...]] = [(sum(sizes),)]
    if isinstance(action, MultiDiscrete | MultiBinary) and len({*sizes}) == 1:
        shapes.append((*action.shape, sizes[0]))
    if isinstance(mask, Discrete) or mask.shape not in shapes:
        seen = "Discrete" if isinstance(mask, Discrete) else f"{math.prod(mask.shape)} flags of shape {mask.shape}"
        raise ValueError(f"it is {seen}, and {' or '.join(map(str, shapes))} is due")
    if isinstance(mask, MultiDiscrete) and not ({*mask.flat_nvec} == {2} and {*mask.flat_start} == {0}):
        raise ValueError("its numbers are not those of flags")
    if isinstance(mask, Box):
        low, high = box_bounds(mask)
        if not ((low <= 1).all() and (high >= 1).all()):
            raise ValueError(f"its numbers are from {low.min()} to {high.max()}, which are not those of flags")
