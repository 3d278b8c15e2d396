"""A module's weights as arrays by name, and back into the module in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.errors import ModuleError, WhichModuleError
from headrace.schemas.weights import split_modules


def read_weights(module: torch.nn.Module) -> dict[str, NDArray[Any]]:
    """Copies of all parameters and buffers of the state dict."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in module.state_dict().items()}


def check_weights(module: torch.nn.Module, state: Mapping[str, NDArray[Any]]) -> None:
    """Raise `ModuleError` unless `state` has the names and shapes of the module's parameters and buffers."""
    own = module.state_dict()
    missing, strange = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or strange:
        raise ModuleError(
            f"weights do not fit the module: missing {missing[:5]}, unknown {strange[:5]}; "
            "worker and learner must build the same module"
        )
    for name, tensor in own.items():
        if tuple(state[name].shape) != tuple(tensor.shape):
            raise ModuleError(
                f"weights do not fit the module: {name!r} has shape {tuple(state[name].shape)}, "
                f"the module's {tuple(tensor.shape)}; worker and learner must build the same module"
            )


def write_weights(module: torch.nn.Module, state: Mapping[str, NDArray[Any]]) -> None:
    """Copy `state` into the module's own memory, all of it or, with a `ModuleError`, nothing."""
    check_weights(module, state)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(_tensor(state[name]))


def weights_by_module(state: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """{module id: its arrays} of what a runner of `modules` is given: that already, names joined by
    `schemas.weights.join_modules`, or the arrays of the only module there is.

    Raises `WhichModuleError` for a module that is not there, or arrays that say of no module which one is theirs.
    """
    if all(isinstance(value, Mapping) for value in state.values()):
        given = dict(state)
    elif (split := split_modules(state)) is not None:
        given = dict(split)
    elif len(modules) == 1:
        given = {modules[0]: state}
    else:
        raise WhichModuleError(None, modules)
    for module_id in given:
        if module_id not in modules:
            raise WhichModuleError(module_id, modules)
    return given


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    # Arrays from the wire are read-only, about which torch warns; a copy is small beside the broadcast.
    return torch.from_numpy(np.array(array))
