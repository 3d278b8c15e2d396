"""What connectors of several modules know: by module, as they have it, and by pipeline, as a runner's state has it."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.workers.connectors.connector import State
from headrace.workers.connectors.vector_connectors import PIPELINES

ByModule = dict[str, dict[str, State]]
"""Module id -> {"env_to_module": arrays by name, "module_to_env": likewise}."""


def by_pipeline(states: Mapping[str, Mapping[str, State]]) -> dict[str, State]:
    """{"env_to_module": {"p0/0.MeanStd/obs/count": array}, "module_to_env": likewise}."""
    return {
        key: {f"{module_id}/{name}": array for module_id, own in states.items() for name, array in own[key].items()}
        for key in PIPELINES
    }


def by_module(states: Mapping[str, State]) -> ByModule:
    """What `by_pipeline` gave, or a part of it, by module again; pipelines of which there is nothing are left out."""
    modules: ByModule = {}
    for key, state in states.items():
        for name, array in state.items():
            module_id, _, rest = name.partition("/")
            modules.setdefault(module_id, {}).setdefault(key, {})[rest] = array
    return modules
