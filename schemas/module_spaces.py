"""The modules of a fleet: what may name one, and the spaces of each as workers tell them and learners read them.

    {module id: {"observation": space, "action": space}}

A fleet of one agent has one module, `DEFAULT_MODULE_ID`. Peers of protocol 1.0 tell its pair of spaces alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headrace.schemas.errors import DecodeError
from headrace.schemas.spaces import Spaces, spaces_from_json

DEFAULT_MODULE_ID = "default_policy"

MOST_MODULES = 512
"""What one cut gives, and what a drain gives after it, must both fit a recorder's window of 1024 batches."""


def check_module_ids(ids: Collection[Any]) -> None:
    """Raise ValueError unless these may be the modules of one fleet: an id stands before a slash in names of arrays."""
    if not ids:
        raise ValueError("there must be at least one policy")
    if len(ids) > MOST_MODULES:
        raise ValueError(f"there are {len(ids)} policies; at most {MOST_MODULES} are possible")
    for module_id in ids:
        if not isinstance(module_id, str) or not module_id or "/" in module_id:
            raise ValueError(f"{module_id!r:.80} is no name for a policy; give a non-empty string without '/'")


def check_mapping_table(table: Mapping[str, str], ids: Collection[str]) -> None:
    """Raise ValueError if an agent is mapped to a module that is not among `ids`."""
    for agent, module_id in table.items():
        if module_id not in ids:
            raise ValueError(f"agent {agent!r} is mapped to {module_id!r}; the policies are {sorted(ids)!r:.200}")


def module_spaces_to_json(spaces: Mapping[str, Spaces]) -> dict[str, Any]:
    """As a worker's HELLO tells them."""
    return {module_id: own.model_dump(mode="json") for module_id, own in spaces.items()}


def told_by_module(told: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a peer of this or the previous minor version as today's peers tell it; not checked otherwise."""
    observation = told.get("observation")
    is_pair = isinstance(observation, dict) and isinstance(observation.get("kind"), str)
    return {DEFAULT_MODULE_ID: told} if is_pair else told


def module_spaces_from_json(told: Any) -> dict[str, Spaces]:
    """What a peer of this or the previous minor version told; raises `DecodeError`."""
    if not isinstance(told, dict) or not told:
        raise DecodeError("bad_space", "spaces are no object by module id")
    by_module = told_by_module(told)
    try:
        check_module_ids(by_module)
    except ValueError as error:
        raise DecodeError("bad_space", str(error)) from error
    return {module_id: spaces_from_json(pair) for module_id, pair in by_module.items()}
