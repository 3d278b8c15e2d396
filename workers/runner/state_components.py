"""Selection of parts of a runner's state: "rl_module", or "rl_module/p0" for a part of that component."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.schemas.errors import StateError

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
