"""What of a runner goes into another, or into the next life of the same: weights, connectors, counters, streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.schemas.errors import ModuleError, StateError
from headrace.schemas.ledger import Discard
from headrace.workers.callbacks import CallbackList
from headrace.workers.connectors.connector import State
from headrace.workers.connectors.vector_connectors import PIPELINES, join_states
from headrace.workers.metrics.runner_metrics import RunnerMetrics
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.runner.state_components import RANDOM_STREAMS, RL_MODULE, Selection, Wanted


@dataclass(frozen=True, slots=True)
class Version:
    """Which weights act."""

    learner_epoch: int = 0
    seq: int = 0
    digest: str = ""


def _problem(name: str, tree: Any) -> str | None:
    """What is wrong with `tree`, called `name`, unless it is a mapping of arrays, or of such mappings."""
    if not isinstance(tree, Mapping):
        return f"{name} should be a dict of arrays by name, got {tree!r:.80}"
    for key, part in tree.items():
        if not isinstance(key, str):
            return f"{name} should have names, got {key!r:.80} among them"
        if not hasattr(part, "shape") and (problem := _problem(f"{name}/{key}", part)):
            return problem
    return None


def _check_kinds(state: Any) -> None:
    """Raise `StateError` unless each part of a state is of the kind that `get_state` gives."""
    if not isinstance(state, Mapping):
        raise StateError(f"a state is a dict as get_state gives it, got {state!r:.80}")
    for name in (RL_MODULE, *PIPELINES):
        if name in state and (problem := _problem(name, state[name])):
            raise StateError(problem)
    if not isinstance(streams := state.get(RANDOM_STREAMS, {}), Mapping):
        raise StateError(f"random_streams should be a dict, got {streams!r:.80}")
    for name in ("learner_epoch", "weights_seq_no"):
        value = state.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
            raise StateError(f"{name} should be a number from 0, got {value!r:.80}")


class RunnerState(ABC):
    """The part of a runner that takes weights and states, and gives them."""

    worker_index: int
    totals: RunnerTotals
    callbacks: CallbackList
    _metrics: RunnerMetrics
    _version: Version
    _waiting: tuple[Mapping[str, Any], Version] | None
    """Weights of another learner's epoch, until the open fragment is cut."""

    @abstractmethod
    def _abandon(self, reason: Discard) -> None:
        """Every open episode is over."""

    @property
    @abstractmethod
    def _hangs(self) -> bool:
        """Whether some action waits for its answer: a step of the weights that chose it, although none is open."""

    @abstractmethod
    def _write_weights(self, state: Mapping[str, Any]) -> None:
        """Put `state` into the policy, all of it or, with a typed error, nothing; see `set_weights`."""

    @abstractmethod
    def _read_weights(self) -> dict[str, Any] | None:
        """The policy's weights; None if there is none."""

    @abstractmethod
    def _read_connectors(self) -> dict[str, State]:
        """State of each connector pipeline by its name; none of a runner without an env."""

    @abstractmethod
    def _write_connectors(self, states: Mapping[str, State]) -> None:
        """Take over what is there of them, all of it or, with a `ConnectorError` for what does not fit, nothing."""

    def _select_weights(self, selection: Selection, weights: Mapping[str, Any]) -> dict[str, Any]:
        """What is wanted of what `_read_weights` gave."""
        return selection.part(RL_MODULE, weights)

    def _join(self, weights: Mapping[str, Any], connectors: Mapping[str, State]) -> dict[str, Any]:
        """Both as `set_weights` takes them, of what `_read_weights` and `_read_connectors` gave."""
        return {**weights, **join_states(connectors)}

    def get_counters(self) -> dict[str, Any]:
        """Lifetime counters, as they are in every state."""
        return self._metrics.read_counters()

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Go on counting from those that are there. Raises `StateError` for what is no counter."""
        self._metrics.write_counters(counters)

    def set_weights(self, state: Mapping[str, Any], seq: int, learner_epoch: int = 0, digest: str = "") -> None:
        """Act with `state` from the next poll on. Raises `ModuleError`, changing nothing, if it does not fit.

        Arrays whose names begin with "connectors/" are connector state of the same version: taken together with the
        weights, or not at all, as `merge_connector_updates` gives them; `ConnectorError` if they do not fit.

        Another learner's epoch ends the fragment that is open, whose batch names only one, and takes effect after the
        cut; `weights_version` always tells what acts.
        """
        if problem := _problem("weights", state):
            raise ModuleError(problem)
        version = Version(learner_epoch, seq, digest)
        if learner_epoch != self._version.learner_epoch and (self.totals.open or self._hangs):
            self._waiting = (state, version)
        else:
            self._apply(state, version)

    def _apply(self, state: Mapping[str, Any], version: Version) -> None:
        self._waiting = None
        self._write_weights(state)
        self._version = version
        self.callbacks.call("on_weights_applied", version=self.weights_version)

    @property
    def weights_version(self) -> tuple[int, int]:
        """(learner_epoch, seq) of the weights in use; (0, 0) are those the module was built with."""
        return self._version.learner_epoch, self._version.seq

    def get_state(self, components: Wanted = None, not_components: Wanted = None) -> dict[str, Any]:
        """Plain values and arrays, from which another runner goes on: see `state_to_arrays` for the way there.

        Lifetime counters are always there. Components: "rl_module", weights as arrays by name, with "weights_seq_no",
        "learner_epoch" and "weights_digest"; "env_to_module" and "module_to_env", the connectors'; "random_streams",
        seeds, numbers and episode ids to come. "rl_module/p0" is a part of one: a module's, which in a runner of one is
        "default_policy", or a single connector's "env_to_module/0.MeanStd" there. What a runner has not is absent.
        Raises `StateError` for a component nobody knows, or a part that is not there.
        """
        selection = Selection(components, not_components)
        state: dict[str, Any] = self._metrics.read_counters()
        for name, value in self._read_connectors().items():
            if selection.wants(name):
                state[name] = selection.part(name, value)
        weights = self._read_weights() if selection.wants(RL_MODULE) else None
        wanted = self._select_weights(selection, weights) if weights is not None else {}
        if wanted:
            version = self._version
            state[RL_MODULE] = wanted
            state["weights_seq_no"], state["learner_epoch"] = version.seq, version.learner_epoch
            state["weights_digest"] = version.digest
        streams = self._read_streams() if selection.wants(RANDOM_STREAMS) else None
        if streams is not None:
            state[RANDOM_STREAMS] = streams
        return state

    def set_state(self, state: Mapping[str, Any], *, force: bool = False) -> None:
        """Take over what of `state` is there; weights only if (learner_epoch, weights_seq_no) is newer, or `force`.

        Connector state that comes with weights is taken or left together with them. "random_streams" are taken if they
        are of the same worker_index, for no two workers may live through the same: this runner then goes on as the
        other would have, its own open episodes are abandoned, and those of the other are not taken over.
        Raises `StateError`, `ModuleError` or `ConnectorError` for what does not fit.
        """
        _check_kinds(state)
        streams = state.get(RANDOM_STREAMS)
        if streams is not None and streams.get("worker_index") != self.worker_index:
            streams = None
        if streams is not None:
            self.callbacks.check_at_rest("set_state() with random_streams")
        place_streams = self._accept_streams(streams) if streams is not None else None
        if place_streams is not None:
            self._abandon(Discard.RESET)
        connectors = {key: state[key] for key in PIPELINES if key in state}
        if RL_MODULE in state:
            epoch, seq = int(state.get("learner_epoch", 0)), int(state.get("weights_seq_no", 0))
            if force or (epoch, seq) > self.weights_version:
                weights = self._join(state[RL_MODULE], connectors)
                self.set_weights(weights, seq, epoch, str(state.get("weights_digest", "")))
        elif connectors:
            self._write_connectors(connectors)
        self._metrics.write_counters(state)
        if place_streams is not None:
            place_streams()

    @abstractmethod
    def _read_streams(self) -> dict[str, Any] | None:
        """Where random streams stand; None where a runner without an env has none to give."""

    @abstractmethod
    def _accept_streams(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """What puts `state` in place, once it is known to fit; raises `StateError` if it does not."""
