"""Actions that an external env logged, put in place of the policy's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.basics.tensor_array import array_of
from headrace.schemas.chunks.batch import OFF_POLICY
from headrace.schemas.chunks.spaces import Space, leaves, nest
from headrace.workers.envs.actions import action_root
from headrace.workers.policy.acting import Columns


def put_logged(
    columns: Columns, logged: Mapping[int, Mapping[str, NDArray[Any]]], module: Any, space: Space
) -> Columns:
    """Return the policy's `columns` (width, ...) with the logged actions of the lanes `logged`, in new arrays.

    - "actions" are the policy's actions. Where the env gets another column ("actions_for_env"), the module's
      `policy_actions(env_actions)` converts the logged actions. Without that method "actions" has the env's actions.
    - "logp" is the log-probability of the logged actions, by `module.logp` and the column "action_dist_inputs";
      NaN where it is not available.
    - "off_policy" marks the lanes with logged actions.

    `module` may be None.
    """
    lanes = np.array(sorted(logged), np.intp)
    taken = {name: np.stack([logged[lane][name] for lane in lanes.tolist()]) for name, _ in leaves(space, "actions")}
    done = {**columns}
    _put(done, OFF_POLICY, lanes, True)
    chosen, in_policys_terms = taken, action_root(columns) == "actions"
    if not in_policys_terms:
        for name, rows in taken.items():
            _put(done, "actions_for_env" + name.removeprefix("actions"), lanes, rows)
        if hasattr(module, "policy_actions"):
            chosen, in_policys_terms = module.policy_actions(taken), True
    for name, rows in chosen.items():
        _put(done, name, lanes, rows)
    if "logp" in columns:
        _put(done, "logp", lanes, np.nan)
        if in_policys_terms and hasattr(module, "logp") and "action_dist_inputs" in columns:
            _put(done, "logp", lanes, _logp(module, columns["action_dist_inputs"][lanes], chosen, space))
    return done


def _logp(module: Any, dist_inputs: NDArray[Any], actions: Mapping[str, NDArray[Any]], space: Space) -> NDArray[Any]:
    place = next((parameter.device for parameter in module.parameters()), "cpu")
    tensors: Mapping[str, Any] = {name: torch.from_numpy(rows).to(place) for name, rows in actions.items()}
    with torch.inference_mode():
        return array_of(module.logp(torch.from_numpy(dist_inputs).to(place), nest(space, tensors, "actions")))


def _put(columns: Columns, name: str, lanes: NDArray[np.intp], rows: NDArray[Any] | float) -> None:
    column = columns[name].copy()
    column[lanes] = rows
    columns[name] = column
