"""Names the weights and connector state of a runner's policy: plain names for one module, by id for several."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.errors import ConnectorError, ModuleError, StateError
from headrace.schemas.messages.weights import split_modules
from headrace.workers.connectors.connector import State
from headrace.workers.connectors.vector_connectors import PIPELINES, join_states, split_states
from headrace.workers.policy.acting_module import ActingModule
from headrace.workers.policy.module_weights import weights_by_module
from headrace.workers.sampling.module_batches import ModuleBatches

RL_MODULE = "rl_module"
ENV_TO_MODULE = "env_to_module"
MODULE_TO_ENV = "module_to_env"
RANDOM_STREAMS = "random_streams"
COMPONENTS = (ENV_TO_MODULE, MODULE_TO_ENV, RL_MODULE, RANDOM_STREAMS)
"""Parts that can be left out. Counters are always included."""

Wanted = str | Iterable[str] | None
"""One component or part, or several; None for no restriction."""


class Selection:
    """The parts that `components` (None: all) names and `not_components` does not.

    Raises `StateError` for an unknown component.
    """

    def __init__(self, components: Wanted, not_components: Wanted) -> None:
        self._wanted = None if components is None else _paths(components)
        self._unwanted = _paths(not_components or ())

    def wants(self, component: str) -> bool:
        """Return whether any part of `component` is selected."""
        if (component,) in self._unwanted:
            return False
        return self._wanted is None or any(path[0] == component for path in self._wanted)

    def part(self, component: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the selected entries of the `state` of one component. Raises `StateError` for an unknown part.

        A part is the entry of that name and all entries whose names begin with it and a slash.
        """
        parts = {name.partition("/")[0]: None for name in state}
        wanted = [path[1:] for path in self._wanted or [(component,)] if path[0] == component]
        unwanted = [path[1:] for path in self._unwanted if path[0] == component]
        for path in (*wanted, *unwanted):
            if path and path[0] not in parts:
                raise StateError(f"{component} has no part {path[0]!r}; its parts are {', '.join(parts) or 'none'}")
        named = {part for path in wanted for part in (path or parts)} - {path[0] for path in unwanted if path}
        return {name: value for name, value in state.items() if name.partition("/")[0] in named}


def _paths(given: str | Iterable[str]) -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = []
    for text in [given] if isinstance(given, str) or not isinstance(given, Iterable) else given:
        if not isinstance(text, str):
            raise StateError(f"components are given by name, as 'rl_module', got {text!r:.80}")
        component, slash, part = text.partition("/")
        if component not in COMPONENTS:
            near = difflib.get_close_matches(component, COMPONENTS, n=1, cutoff=0.0)[0]
            raise StateError(f"a runner's state has no component {component!r}; the nearest is {near!r}")
        paths.append((component, part) if slash else (component,))
    return paths


Policies = Mapping[str, ActingModule]
Parts = dict[str, tuple[State | None, dict[str, State]]]
"""Module id -> its weights (None: they stay as they are) and its connector state by pipeline."""
ByModule = dict[str, dict[str, State]]
"""Module id -> {"env_to_module": arrays by name, "module_to_env": arrays by name}."""


class ModuleIdNames:
    """Arguments and results of a runner's methods, in the names of a runner with several modules.

    All are by module id, pipelines as {"p0/0.MeanStd/obs/count": array}.
    """

    def given(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the argument of a method by module id."""
        return state

    def shown(self, by_module: dict[str, Any]) -> dict[str, Any]:
        """Return what is by module id as the result of a method."""
        return by_module

    def split(self, policies: Policies, state: Mapping[str, Any]) -> Parts:
        """Return the parts of the argument of `set_weights`. Raises `ModuleError` for an unknown module."""
        parts: Parts = {}
        for module_id, own in weights_by_module(state, list(policies)).items():
            weights, connectors = split_states(own)
            parts[module_id] = (weights if weights or not connectors else None), connectors
        return parts

    def check(self, policies: Policies, weights: Mapping[str, Any]) -> None:
        """Raise `StateError` for weights in a state that are not by module id."""
        if flat := [name for name, own in weights.items() if not isinstance(own, Mapping)]:
            raise StateError(f"rl_module should have weights by module id, {sorted(policies)}, got {flat[0]!r:.80}")

    def read_connectors(self, policies: Policies) -> dict[str, State]:
        """Return the connectors' state by pipeline."""
        if not policies:
            return {}
        states = {module_id: policy.connectors.get_state() for module_id, policy in policies.items()}
        return {
            key: {f"{module_id}/{name}": array for module_id, own in states.items() for name, array in own[key].items()}
            for key in PIPELINES
        }

    def connectors_by_module(self, policies: Policies, states: Mapping[str, State]) -> ByModule:
        """Return the result of `read_connectors`, or a part of it, by module id. Raises `ConnectorError`."""
        by_module = _by_module(states)
        for module_id in by_module:
            if module_id not in policies:
                known = f"the modules are {sorted(policies)!r:.200}"
                raise ConnectorError(f"of {module_id!r}", f"there is no such module; {known}")
        return by_module

    def take_update(self, policies: Policies) -> dict[str, Any]:
        """Return what connectors have learnt since the last call."""
        return self.shown({module_id: policy.connectors.take_update() for module_id, policy in policies.items()})

    def merge(
        self, policies: Policies, state: Mapping[str, Any], updates: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return `state`, the previous result or {}, merged with the `updates` of all runners."""
        known, learnt, merged = self.given(state), [self.given(update) for update in updates], {}
        for module_id, policy in policies.items():
            _, before = split_states(known.get(module_id, {}))
            own = [update.get(module_id, {}) for update in learnt]
            merged[module_id] = join_states(policy.connectors.merge(before, own))
        return self.shown(merged)

    def attach_update(self, policies: Policies, batch: Any) -> Any:
        """Return `batch` with the connectors' updates. The connectors keep their updates if the batch has no chunks."""
        attached = {i: policies[i].connectors.attach_update(own) for i, own in batch.batches.items()}
        learnt = any(attached[i] is not own for i, own in batch.batches.items())
        return ModuleBatches(attached) if learnt else batch


class OneModuleNames(ModuleIdNames):
    """Names of a runner with one module: weights by parameter, connector state by pipeline."""

    def given(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return {DEFAULT_MODULE_ID: state}

    def shown(self, by_module: dict[str, Any]) -> dict[str, Any]:
        return dict(by_module.get(DEFAULT_MODULE_ID, {}))

    def split(self, policies: Policies, state: Mapping[str, Any]) -> Parts:
        if not policies or policies[DEFAULT_MODULE_ID].module is None:
            raise ModuleError("this runner has no module to take weights")
        by_module = split_modules(state) if state else None
        if by_module is not None:
            state = weights_by_module(by_module, [DEFAULT_MODULE_ID])[DEFAULT_MODULE_ID]
        return {DEFAULT_MODULE_ID: split_states(state)}

    def check(self, policies: Policies, weights: Mapping[str, Any]) -> None:
        """Do nothing: weights are by parameter."""

    def read_connectors(self, policies: Policies) -> dict[str, State]:
        return policies[DEFAULT_MODULE_ID].connectors.get_state() if policies else {}

    def connectors_by_module(self, policies: Policies, states: Mapping[str, State]) -> ByModule:
        return {DEFAULT_MODULE_ID: dict(states)}

    def attach_update(self, policies: Policies, batch: Any) -> ChunkBatch:
        return policies[DEFAULT_MODULE_ID].connectors.attach_update(batch)


def _by_module(states: Mapping[str, State]) -> ByModule:
    """Split pipelines, whose names begin with module ids, by module. Leave out pipelines without names."""
    modules: ByModule = {}
    for key, state in states.items():
        for name, array in state.items():
            module_id, _, rest = name.partition("/")
            modules.setdefault(module_id, {}).setdefault(key, {})[rest] = array
    return modules
