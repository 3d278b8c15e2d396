"""A runner's state: the weights in use, and the state from which another runner can continue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.errors import ModuleError, StateError, missing_env_error
from headrace.workers.callbacks import CallbackList
from headrace.workers.connectors.vector_connectors import PIPELINES
from headrace.workers.metrics.runner_metrics import RunnerMetrics
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.acting_module import ActingModule
from headrace.workers.runner.policy_names import RANDOM_STREAMS, RL_MODULE, ModuleIdNames, Parts, Selection
from headrace.workers.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Version:
    """The version of the weights that act."""

    learner_epoch: int = 0
    seq: int = 0
    digest: str = ""


def _problem(name: str, tree: Any) -> str | None:
    """Return what is wrong with `tree`, called `name`; None for a mapping of arrays, or of such mappings."""
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


_MOST_DIGESTS = 64


@dataclass(eq=False, repr=False)
class RunnerState:
    """The weights that a runner acts with, and the state that it saves and restores."""

    _names: ModuleIdNames
    _read_sampler: Callable[[], Sampler[Any, Any] | None]
    _worker_index: int
    _metrics: RunnerMetrics
    _totals: RunnerTotals
    _callbacks: CallbackList

    def __post_init__(self) -> None:
        self.version = Version()
        """The version of the weights that act."""
        self._digests: dict[int, str] = {}
        """Digests of the newest versions of this epoch, by seq: steps that are not cut yet were chosen under them."""
        self.waiting: tuple[Parts, Version] | None = None
        """Weights of another learner's epoch, until the open fragment is cut."""

    @property
    def _policies(self) -> Mapping[str, ActingModule]:
        sampler = self._read_sampler()
        return sampler.steps.policies if sampler is not None else {}

    @property
    def _has_open_steps(self) -> bool:
        """Return whether steps of the weights in use were not cut yet. A chosen action without an answer counts."""
        sampler = self._read_sampler()
        return bool(self._totals.open) or (sampler is not None and sampler.steps.has_pending)

    # -- weights ------------------------------------------------------------------------------------------------------

    @property
    def weights_version(self) -> tuple[int, int]:
        """(learner_epoch, seq) of the weights in use."""
        return self.version.learner_epoch, self.version.seq

    def set_weights(self, state: Mapping[str, Any], version: Version) -> None:
        """Act with `state` from the next poll on, or after the next cut; see `EnvRunner.set_weights`."""
        if problem := _problem("weights", state):
            raise ModuleError(problem)
        self._take(self._names.split(self._policies, state), version)

    def _take(self, parts: Parts, version: Version) -> None:
        if version.learner_epoch != self.version.learner_epoch and self._has_open_steps:
            self._check(parts)
            self.waiting = (parts, version)
        else:
            self._apply(parts, version)

    def apply_waiting(self) -> None:
        """Act with the weights that waited for a cut, if there are any.

        Raises as `set_weights` does, and `CallbackError`.
        """
        if self.waiting is not None:
            self._apply(*self.waiting)

    def _check(self, parts: Parts) -> None:
        for module_id, (weights, connectors) in parts.items():
            self._policies[module_id].check(weights, connectors)

    def _write(self, parts: Parts) -> None:
        """Write all of `parts`, or raise `ModuleError` or `ConnectorError` and write none."""
        self._check(parts)
        for module_id, (weights, connectors) in parts.items():
            self._policies[module_id].write(weights, connectors)

    def _drop_updates(self, parts: Parts) -> None:
        """Drop what connectors with a state in `parts` have learnt since their last update. Raises as `_write` does."""
        self._check(parts)
        for module_id, (_, connectors) in parts.items():
            self._policies[module_id].connectors.take_update(connectors)

    def _apply(self, parts: Parts, version: Version) -> None:
        self.waiting = None
        self._write(parts)
        if version.learner_epoch != self.version.learner_epoch:  # a batch has steps of one epoch
            for policy in self._policies.values():
                policy.drop_chosen(None)
        self.note_version(version)
        self._callbacks.call("on_weights_applied", version=self.weights_version)

    def note_version(self, version: Version) -> None:
        """Set the version of the weights in use."""
        if version.learner_epoch != self.version.learner_epoch:
            self._digests.clear()
        elif len(self._digests) >= _MOST_DIGESTS:
            del self._digests[min(self._digests)]
        self.version, self._digests[version.seq] = version, version.digest

    def digest_of(self, seqs: NDArray[np.int64]) -> str:
        """Return the digest of the newest of these versions, or of the one in use without any; "" if unknown."""
        return self._digests.get(int(seqs.max()), "") if len(seqs) else self.version.digest

    # -- states -------------------------------------------------------------------------------------------------------

    def get(self, selection: Selection) -> dict[str, Any]:
        """Return the wanted parts of the state; see `EnvRunner.get_state`."""
        state: dict[str, Any] = self._metrics.read_counters()
        policies, sampler = self._policies, self._read_sampler()
        for name, value in self._names.read_connectors(policies).items():
            if selection.wants(name):
                state[name] = selection.part(name, value)
        weights = {}
        if selection.wants(RL_MODULE):
            own = {module_id: policy.read_weights() for module_id, policy in policies.items()}
            weights = {module_id: arrays for module_id, arrays in own.items() if arrays is not None}
        if weights and (wanted := self._names.shown(selection.part(RL_MODULE, weights))):
            version = self.version
            state[RL_MODULE] = wanted
            state["weights_seq_no"], state["learner_epoch"] = version.seq, version.learner_epoch
            state["weights_digest"] = version.digest
        if sampler is not None and selection.wants(RANDOM_STREAMS):
            state[RANDOM_STREAMS] = {"worker_index": self._worker_index, **sampler.steps.read_streams()}
        return state

    def set(self, state: Mapping[str, Any], *, force: bool) -> None:
        """Take over the parts of `state`; see `EnvRunner.set_state`."""
        _check_kinds(state)
        streams, place_streams = state.get(RANDOM_STREAMS), None
        if streams is not None and streams.get("worker_index") == self._worker_index:
            self._callbacks.check_at_rest("set_state() with random_streams")
            sampler = self._read_sampler()
            if sampler is None:
                raise missing_env_error()
            place_streams = sampler.steps.accept_streams(streams)
            sampler.abandon(Discard.RESET)
        policies, connectors = self._policies, {key: state[key] for key in PIPELINES if key in state}
        if RL_MODULE in state:
            epoch, seq = int(state.get("learner_epoch", 0)), int(state.get("weights_seq_no", 0))
            if force or (epoch, seq) > self.weights_version:
                self._names.check(policies, state[RL_MODULE])
                parts = self._names.split(policies, state[RL_MODULE])
                for module_id, own in self._names.connectors_by_module(policies, connectors).items():
                    parts[module_id] = parts.get(module_id, (None, {}))[0], own
                self._drop_updates(parts)
                self._take(parts, Version(epoch, seq, str(state.get("weights_digest", ""))))
        elif connectors:
            if not policies:
                raise missing_env_error()
            by_module = self._names.connectors_by_module(policies, connectors)
            parts = {module_id: (None, own) for module_id, own in by_module.items()}
            self._drop_updates(parts)
            self._write(parts)
        self._metrics.write_counters(state)
        if place_streams is not None:
            place_streams()
