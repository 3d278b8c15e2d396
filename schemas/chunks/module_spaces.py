"""The modules of a fleet: valid ids, and the spaces of each as workers send them and learners read them.

    {module id: {"observation": space, "action": space}}

A fleet of one agent has one module, `DEFAULT_MODULE_ID`. Peers of protocol 1.0 send only its pair of spaces.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from headrace.schemas.chunks.spaces import Spaces, spaces_from_json
from headrace.schemas.errors import DecodeError

DEFAULT_MODULE_ID = "default_policy"

MOST_MODULES = 512
"""The batches of one cut, and those of a drain after it, must together fit a recorder's window of 1024 batches."""


def check_module_ids(ids: Collection[Any]) -> None:
    """Raise ValueError unless these may be the modules of one fleet. In names of arrays an id stands before a slash."""
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
    """Return the spaces as a worker's HELLO carries them."""
    return {module_id: own.model_dump(mode="json") for module_id, own in spaces.items()}


def told_by_module(told: dict[str, Any]) -> dict[str, Any]:
    """Convert the spaces JSON of a peer of this or the previous minor version to today's form. Checks nothing else."""
    observation = told.get("observation")
    is_pair = isinstance(observation, dict) and isinstance(observation.get("kind"), str)
    return {DEFAULT_MODULE_ID: told} if is_pair else told


def module_spaces_from_json(told: Any) -> dict[str, Spaces]:
    """Parse the spaces of a peer of this or the previous minor version. Raises `DecodeError`."""
    if not isinstance(told, dict) or not told:
        raise DecodeError("bad_space", "spaces are no object by module id")
    by_module = told_by_module(told)
    try:
        check_module_ids(by_module)
    except ValueError as error:
        raise DecodeError("bad_space", str(error)) from error
    return {module_id: spaces_from_json(pair) for module_id, pair in by_module.items()}
