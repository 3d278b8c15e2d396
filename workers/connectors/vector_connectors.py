"""Both pipelines of one module, and the observations of its lanes after env_to_module."""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.spaces import Spaces, leaves
from headrace.schemas.errors import ConnectorError
from headrace.schemas.messages.weights import CONNECTORS
from headrace.workers.connectors.connector import Columns, Exportable, Rows, State, Tensors
from headrace.workers.connectors.pipeline import Pipeline
from headrace.workers.envs.bounds import ActionLimits, blank_columns

PIPELINES = ("env_to_module", "module_to_env")


class VectorConnectors:
    """Both pipelines of one module for all lanes of a vector.

    `spaces` are the module's. `columns` (width, ...) hold the newest observation of each lane as the module sees it.
    Without env_to_module pieces `columns` are the env's own, and nothing is computed or copied. Errors name `owner`.
    """

    def __init__(
        self,
        env_to_module: Sequence[Any],
        module_to_env: Sequence[Any],
        spaces: Spaces,
        observed: Columns,
        owner: str = "",
    ) -> None:
        self._inward, self._outward = map(Pipeline, PIPELINES, (env_to_module, module_to_env), (owner, owner))
        self.observed = observed
        """The env's own observations, which the caller writes."""
        width = len(next(iter(observed.values())))
        self._all = np.arange(width)
        self._agents = np.zeros(width, np.intp)
        self._limits = ActionLimits(spaces.action, "actions")
        """The bounds of choices for the env."""
        self._idle = blank_columns(spaces.action, "actions", 1)  # sent to a vector that steps rows that do not act too
        outward = self._outward.connect_actions(spaces, width)
        self.spaces = self._inward.connect_observations(outward, width)
        self.sees = bool(self._inward.pieces)
        """True if the caller must report observations by `stepped`. Without env_to_module pieces it must not."""
        self.columns: Columns = self._new_columns(width) if self.sees else observed
        self.actions = [name for name, _ in leaves(self.spaces.action, "actions")]
        """Names of the policy's action columns."""
        self.inward_s = self.outward_s = 0.0
        """Seconds in env_to_module, and in module_to_env."""

    def _new_columns(self, width: int) -> Columns:
        return blank_columns(self.spaces.observation, "obs", width)

    def widen(self, observed: Columns, agents: NDArray[np.intp]) -> None:
        """Make room for more lanes after the existing ones.

        `observed` are the newest env observations of all lanes, `agents` the agent of each lane. Replaces `columns` by
        new arrays. Raises `ConnectorError`; the caller then calls it again with the same arguments.
        """
        width = len(agents)
        for pipeline in self._pipelines:
            pipeline.widen(width)
        self.observed, self._agents, self._all = observed, agents, np.arange(width)
        before, self.columns = self.columns, self._new_columns(width) if self.sees else observed
        if self.sees:
            for name, column in before.items():
                self.columns[name][: len(column)] = column

    def started(self, lanes: Sequence[int] | NDArray[np.intp]) -> None:
        """Reset `lanes`, where an episode began, and process its first observation, which has arrived."""
        index = np.array(lanes, np.intp)
        self._inward.reset(index)
        self._outward.reset(index)
        if self.sees:
            self._see(index, {}, np.zeros(len(index)), first=True)

    def stepped(self, lanes: NDArray[np.intp], actions: Columns, rewards: NDArray[np.float64]) -> None:
        """Process the new observations of `lanes`, with the policy's `actions` that led to them, and `rewards`.

        Arrays have one row for each of `lanes`.
        """
        self._see(lanes, actions, rewards, first=False)

    def _see(self, lanes: NDArray[np.intp], actions: Columns, rewards: NDArray[np.float64], *, first: bool) -> None:
        begun = time.perf_counter()
        arrived = {name: column[lanes] for name, column in self.observed.items()}
        seen = Rows(lanes, arrived, actions, rewards, first, self._agents[lanes])
        for name, rows in self._inward.process(seen).items():
            self.columns[name][lanes] = rows
        self.inward_s += time.perf_counter() - begun

    def for_env(self, columns: Columns, acting: NDArray[np.intp] | None = None) -> Columns:
        """Return the policy's columns, with "actions_for_env" as module_to_env makes them.

        Only the rows of the lanes `acting` (None: all) pass. The other rows of "actions_for_env" have no meaning.
        """
        if not self._outward.pieces:
            return columns
        begun = time.perf_counter()
        those: Any = slice(None) if acting is None else acting
        lanes = self._all[those]
        actions = {name: columns[name][those] for name in self.actions}
        sent = {name: columns.get(_sent(name), columns[name])[those] for name in self.actions}
        made = self._outward.process(Rows(lanes, sent, actions, np.zeros(len(lanes)), False, self._agents[those]))
        problem = self._limits.problem(made)
        for name, column in made.items():
            if column.dtype.kind == "f" and not np.isfinite(column).all():
                problem = f"{name} that are NaN or infinite"
        if problem:
            pieces = ", ".join(type(piece).__name__ for piece in self._outward.pieces)
            raise ConnectorError(pieces, f"module_to_env made {problem}")
        kept = {name: column for name, column in columns.items() if name.split("/", 1)[0] != "actions_for_env"}
        if acting is not None:
            spread = {name: self._idle[name].repeat(len(self._all), 0) for name in made}
            for name, rows in made.items():
                spread[name][acting] = rows
            made = spread
        self.outward_s += time.perf_counter() - begun
        return {**kept, **{_sent(name): rows for name, rows in made.items()}}

    def freeze(self) -> None:
        """Stop all pieces from learning, for a policy that must not change. Raises `ConnectorError`."""
        for pipeline in self._pipelines:
            pipeline.freeze()

    def has(self, kind: type[Any]) -> bool:
        """Return whether a piece is of `kind`."""
        return any(isinstance(piece, kind) for pipeline in self._pipelines for piece in pipeline.pieces)

    @property
    def first_not_exportable(self) -> str | None:
        """Return the name of the first piece that is not `Exportable`; None where all are."""
        pieces = [piece for pipeline in self._pipelines for piece in pipeline.pieces]
        return next((type(piece).__name__ for piece in pieces if not isinstance(piece, Exportable)), None)

    def torch_observations(self, columns: Tensors) -> Tensors:
        """Return the result of `Exportable` pieces for the env's observations, by torch operations."""
        return self._inward.torch_process(columns, {})

    def torch_actions(self, columns: Tensors, actions: Tensors) -> Tensors:
        """Return the result of `Exportable` pieces for actions to the env, given the policy's own `actions`."""
        return self._outward.torch_process(columns, actions)

    # -- state that outlives episodes ---------------------------------------------------------------------------------

    def get_state(self) -> dict[str, State]:
        """Return {"env_to_module": arrays by name, "module_to_env": arrays by name}."""
        return {pipeline.key: pipeline.get_state() for pipeline in self._pipelines}

    def take_update(self, keys: Container[str] = PIPELINES) -> dict[str, State]:
        """Return what was learnt since the last call, by pipeline as in `get_state`: of the pipelines in `keys`."""
        return {pipeline.key: pipeline.take_update() for pipeline in self._pipelines if pipeline.key in keys}

    def attach_update(self, batch: ChunkBatch) -> ChunkBatch:
        """Return `batch` with what was learnt since the last call.

        A batch without chunks is returned unchanged and takes no update, because it is not sent.
        """
        taken = self.take_update() if len(batch) else {}
        update = {f"{key}/{name}": array for key, state in taken.items() for name, array in state.items()}
        return replace(batch, connector_update=update) if update else batch

    def merge(self, state: Mapping[str, State], updates: Sequence[Mapping[str, State]]) -> dict[str, State]:
        """Return `state` with the `updates` of runners. A pipeline absent from a mapping has no state there."""
        return {
            p.key: p.merge(state.get(p.key, {}), [update.get(p.key, {}) for update in updates]) for p in self._pipelines
        }

    def fits(self, state: Mapping[str, State]) -> bool:
        """Return whether `set_state` would accept `state`: the same pieces, for the same spaces."""
        try:
            self.check_state(state)
        except ConnectorError:
            return False
        return True

    def check_state(self, state: Mapping[str, State]) -> None:
        """Raise `ConnectorError` unless the pipelines present in `state` fit."""
        for pipeline in self._pipelines:
            if pipeline.key in state:
                pipeline.check_state(state[pipeline.key])

    def set_state(self, state: Mapping[str, State]) -> None:
        """Set the state of the pipelines present in `state`."""
        for pipeline in self._pipelines:
            if pipeline.key in state:
                pipeline.set_state(state[pipeline.key])

    @property
    def _pipelines(self) -> tuple[Pipeline, Pipeline]:
        return self._inward, self._outward


def _sent(name: str) -> str:
    """Return the column with the action that the env got in place of the action column `name`."""
    return "actions_for_env" + name.removeprefix("actions")


def join_states(states: Mapping[str, State]) -> State:
    """Return connector state under names that begin with `CONNECTORS`, to travel in one mapping with weights."""
    return {f"{CONNECTORS}{key}/{name}": array for key, state in states.items() for name, array in state.items()}


def split_states(arrays: Mapping[str, NDArray[Any]]) -> tuple[State, dict[str, State]]:
    """Return (weights, connector state by pipeline) of one mapping."""
    weights: State = {}
    states: dict[str, State] = {}
    for name, array in arrays.items():
        if name.startswith(CONNECTORS):
            key, _, rest = name.removeprefix(CONNECTORS).partition("/")
            states.setdefault(key, {})[rest] = array
        else:
            weights[name] = array
    return weights, states
