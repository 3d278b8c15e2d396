"""What a connector is, what it is given, and how one is built from the config."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.plugins import build_piece
from headrace.schemas.spaces import Spaces

Columns = dict[str, NDArray[Any]]
State = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One row for each of `lanes`, n of the vector's envs, or of the agents in them. Arrays are not to be written to.

    columns: observation columns (n, ...), or action columns on their way to the env. actions: what the policy chose,
    (n, ...): in the step that gave these observations, or now; none after a reset. rewards: float64 (n,), of the step
    that gave these observations (an agent's may take several of its env's, and has the rewards of all), 0 after a reset
    and on the way to the env. first: the observations are of a reset, or an agent's first ones in its episode.
    agents: (n,), each lane's agent by its place among the env's possible_agents; all 0 where there is one.
    """

    lanes: NDArray[np.intp]
    columns: Columns
    actions: Mapping[str, NDArray[Any]]
    rewards: NDArray[np.float64]
    first: bool
    agents: NDArray[np.intp]


@runtime_checkable
class Connector(Protocol):
    """One piece of a pipeline. Derive from it to inherit what a piece without state need not say.

    What a lane's rows become may depend on that lane alone, or the failure of one env would change what its siblings
    live through. State that outlives episodes is told as arrays by name; that of an episode is kept by lane.
    """

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        """The spaces on the module's side, of those on the env's, for `width` lanes. Called before all else."""
        ...

    def process(self, rows: Rows) -> Columns:
        """Columns for the next piece, of the dtypes and shapes that `connect` promised.

        Called once for each observation, and once for each action.
        """
        ...

    def reset(self, lanes: NDArray[np.intp]) -> None:
        """An episode begins in each of `lanes`: forget what was kept of the last one."""

    def widen(self, width: int) -> None:
        """There are more lanes from now on, below those there were; only where agents come and go.

        A piece with state by lane must grow it. It is told of the same `width` again where another piece failed to.
        """

    def get_state(self) -> State:
        """What outlives episodes, as arrays of one's own by name."""
        return {}

    def set_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `get_state` gave; the names, dtypes and shapes were compared with one's own."""

    def take_update(self) -> State:
        """What was learnt since the last call, to be merged with others' by `merge`; empty if that is nothing.

        Nothing is told twice and nothing left out, whatever state was set in between.
        """
        return {}

    def merge(self, state: State, updates: Sequence[State]) -> State:
        """`state` (empty: none yet) with the `updates` of any runners, in any order. Needs no `connect` before."""
        return state


def build_connector(spec: Any, key: str) -> Connector:
    """A connector of one's own from a connector (copied), or by `plugins.build_piece`.

    `key` names the setting it stands in. Raises `ConfigError` for what is none of these, `ConnectorError` when the
    factory raises.
    """
    if isinstance(spec, Connector) and not isinstance(spec, type):
        return copy.deepcopy(spec)
    built: Connector = build_piece(spec, key, Connector)
    return built
