"""Reset of an env with a task: by `set_task` before the reset if the env has one, otherwise as its options."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any


def reset_with(env: Any, seed: int | None, values: Mapping[str, Any] | None) -> Any:
    """Reset `env` with a task's values, or without a task, and return its answer. The env may keep and change them."""
    if values is None:
        return env.reset(seed=seed)
    own = deepcopy(dict(values))
    if (set_task := task_setter(env)) is None:
        return env.reset(seed=seed, options=own)
    set_task(own)
    return env.reset(seed=seed)


def task_setter(env: Any) -> Any:
    """Return `set_task` of the env or of the outermost wrapper that has it, as gymnasium finds it; None without one."""
    if hasattr(env, "get_wrapper_attr"):
        found = env.get_wrapper_attr("set_task") if env.has_wrapper_attr("set_task") else None
    else:
        found = getattr(env, "set_task", None) or getattr(getattr(env, "unwrapped", None), "set_task", None)
    return found if callable(found) else None
