"""The parts of annexes that sampling finds by name, each when it needs the part. The main house imports no annex."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

_PARTS: Mapping[str, str] = {
    "KeptFailures": "headrace.workers.reruns.kept_failures",
    "MultiAgentEnvRunner": "headrace.workers.agents.multi_agent_env_runner",
    "RemotePlacement": "headrace.workers.envs.remote.pool",
    "as_gymnasium": "headrace.workers.adapters.dm_envs",
    "adapted_agents": "headrace.workers.agents.env",
    "build_any_env": "headrace.workers.agents.packed_env",
    "open_device": "headrace.workers.devices.open_device",
    "limited_construction": "headrace.workers.envs.native.vector_processes",
    "open_native": "headrace.workers.envs.native.partial",
    "problem_of_kind": "headrace.workers.agents.packing",
    "served_config": "headrace.workers.serving.served_env",
}
"""Functions and classes, and their modules."""


def part(name: str) -> Any:
    """Import and return the function or class of an annex. Its docstring says what it takes."""
    return resolve_name(f"{_PARTS[name]}:{name}")
