"""The `Connector` protocol, the rows that a connector gets, and how one is built from the config."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.settings.plugins import build_piece

if TYPE_CHECKING:  # processes that only build connectors start faster without it
    import torch

Columns = dict[str, NDArray[Any]]
State = dict[str, NDArray[Any]]
Tensors = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One row for each of `lanes`. Do not write to the arrays.

    A lane is one of the vector's envs, or one agent in one of them; n is the number of lanes here.

    - columns: observation columns (n, ...), or action columns on their way to the env.
    - actions: the policy's actions (n, ...) in the step that gave these observations, or now on the way to the env;
      empty after a reset.
    - rewards: float64 (n,), of the step that gave these observations. An agent's step may span several env steps
      and has the rewards of all of them. 0 after a reset and on the way to the env.
    - first: whether the observations come from a reset, or are an agent's first ones in its episode.
    - agents: intp (n,), the place of each lane's agent among the env's possible_agents; all 0 with one agent.
    """

    lanes: NDArray[np.intp]
    columns: Columns
    actions: Mapping[str, NDArray[Any]]
    rewards: NDArray[np.float64]
    first: bool
    agents: NDArray[np.intp]


@runtime_checkable
class Connector(Protocol):
    """One piece of a pipeline. Derive from it to inherit the methods that a piece without state does not need.

    The result for a lane may depend on that lane alone. Otherwise the failure of one env would change the episodes of
    its siblings. `get_state` returns state that outlives episodes, as arrays by name. State of an episode is kept by
    lane.
    """

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """Return the spaces on the module's side, given the env's, for `width` lanes. Called before all else."""
        ...

    def process(self, rows: Rows) -> Columns:
        """Return the columns for the next piece, with the dtypes and shapes that `connect` promised.

        Called once for each observation, and once for each action.
        """
        ...

    def reset(self, lanes: NDArray[np.intp]) -> None:
        """Forget the last episode of each of `lanes`, because a new one begins there."""

    def widen(self, width: int) -> None:
        """Make room for `width` lanes; new lanes follow the existing ones. Called only where agents come and go.

        A piece with state by lane must grow it. It gets the same `width` again when another piece failed to grow.
        """

    def get_state(self) -> State:
        """Return the state that outlives episodes, as arrays by name that the caller may keep."""
        return {}

    def set_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Replace the state by one from `get_state`. The caller has already checked names, dtypes and shapes."""

    def take_update(self) -> State:
        """Return what was learnt since the last call, for `merge` to combine; empty if nothing was.

        Nothing is returned twice and nothing is left out, even if `set_state` was called in between.
        """
        return {}

    def merge(self, state: State, updates: Sequence[State]) -> State:
        """Return `state` (empty: none yet) with the `updates` of any runners, in any order. Works before `connect`."""
        return state


@runtime_checkable
class Freezable(Protocol):
    """A connector that learns and can stop. A piece without this method gets its state back after each pass instead."""

    def freeze(self) -> None:
        """Learn nothing from now on."""


@runtime_checkable
class Exportable(Protocol):
    """A connector that can also be a part of an exported policy (`policy.export`)."""

    def torch_process(self, columns: Tensors, actions: Tensors) -> dict[str, torch.Tensor]:
        """Return what `process` returns, by torch operations alone, whatever the rows before these.

        `columns` and `actions` are as in `Rows`; `actions` is empty for observations.
        """


def build_connector(spec: Any, key: str) -> Connector:
    """Return a new connector: a deep copy of a given one, or the result of `plugins.build_piece`.

    `key` names the setting that holds `spec`. Raises `ConfigError` if `spec` is neither a connector nor a factory, and
    `ConnectorError` when the factory raises.
    """
    if isinstance(spec, Connector) and not isinstance(spec, type):
        return copy.deepcopy(spec)
    built: Connector = build_piece(spec, key, Connector)
    return built
