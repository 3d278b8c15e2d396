"""Merger of what the connectors of one module learnt in all runners, as it arrives with the batches.

    merger = ConnectorMerger(env_to_module=["headrace.workers.connectors:MeanStd"])
    for batch in stream:
        merger.take(batch)
        train(module, batch)
        weights.publish({**module.state_dict(), **merger.get_state()})

A batch carries what was learnt since the one before it and is delivered once. So each row that a connector has learnt
from counts once, whichever runner saw it. Keep the state in the checkpoint that has the stream's position: the two then
cover the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.errors import ConnectorError, HeadraceError, words_of
from headrace.schemas.messages.weights import CONNECTORS
from headrace.schemas.settings.plugins import build_piece

State = dict[str, NDArray[Any]]
Spec = str | Mapping[str, Any] | Callable[[], Any]
"""A connector: "package.module:factory", a table of build and config, or the factory itself."""


@runtime_checkable
class Mergeable(Protocol):
    """The part of a connector that a merger needs. The merger never connects it to spaces or passes rows through it."""

    def merge(self, state: State, updates: Sequence[State]) -> State:
        """Merge the `updates` of any runners, in any order, into `state` (empty: none yet)."""
        ...


class ConnectorMerger:
    """Merges connector updates. Build it from the settings of the runners' pipelines, in the same order.

    Raises `ConfigError` for a setting that is not a connector, `ConnectorError` when its factory raises.
    """

    def __init__(self, env_to_module: Sequence[Spec] = (), module_to_env: Sequence[Spec] = ()) -> None:
        self._pieces: dict[str, Mergeable] = {}
        for pipeline, specs in (("env_to_module", env_to_module), ("module_to_env", module_to_env)):
            for i, spec in enumerate(specs):
                piece: Mergeable = build_piece(spec, f"{pipeline}[{i}]", Mergeable)
                self._pieces[f"{pipeline}/{i}.{type(piece).__name__}"] = piece
        self._learnt: dict[str, State] = {}

    def take(self, batch: ChunkBatch) -> None:
        """Merge the update of a batch. Call it once for each batch handed out, also for one that is not trained on.

        Raises `ConnectorError`, and then has taken nothing of the batch.
        """
        merged = dict(self._learnt)
        for name, update in self._by_piece(batch.connector_update, f"a batch of slot {batch.slot}").items():
            merged[name] = self._merge(name, self._learnt.get(name, {}), update)
        self._learnt = merged

    def get_state(self) -> State:
        """Return arrays by name, such as "connectors/env_to_module/0.MeanStd/obs/count".

        Publish them in one mapping with the module's weights. Connectors without any update so far have none.
        """
        return {f"{CONNECTORS}{n}/{part}": a for n, state in self._learnt.items() for part, a in state.items()}

    def set_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a copy of `get_state`'s result. Raises `ConnectorError` for pieces that do not exist."""
        arrays = {name.removeprefix(CONNECTORS): np.array(array) for name, array in state.items()}
        self._learnt = self._by_piece(arrays, "a state")

    def _by_piece(self, arrays: Mapping[str, NDArray[Any]], whose: str) -> dict[str, State]:
        parts: dict[str, State] = {}
        for name, array in arrays.items():
            pipeline, _, rest = name.partition("/")
            title, _, part = rest.partition("/")
            piece = f"{pipeline}/{title}"
            if piece not in self._pieces:
                reason = f"{whose} has it, but the learner's connectors are {sorted(self._pieces)}"
                raise ConnectorError(piece, f"{reason}; give workers and learner the same ones")
            parts.setdefault(piece, {})[part] = array
        return parts

    def _merge(self, name: str, state: State, update: State) -> State:
        try:
            merged = self._pieces[name].merge(state, [update])
            # Copies: arrays of the update are views of a received message, which they would keep in memory.
            return {part: np.array(array) for part, array in merged.items()}
        except HeadraceError:
            raise
        except BaseException as error:
            raise_stop(error)
            seen = ", ".join(f"{part} {array.dtype} {array.shape}" for part, array in update.items())
            raise ConnectorError(name, f"merge: {words_of(error)}", seen) from error
