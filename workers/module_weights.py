"""A module's weights as arrays by name, and back into the module in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.errors import ModuleError


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


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    # Arrays from the wire are read-only, about which torch warns; a copy is small beside the broadcast.
    return torch.from_numpy(np.array(array))
