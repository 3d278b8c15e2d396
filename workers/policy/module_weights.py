"""A module's weights as arrays by name, and back into the module in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.errors import WhichModuleError
from headrace.schemas.messages.weights import check_shapes, split_modules

_DTYPES = {torch.from_numpy(np.empty(0, dtype)).dtype: np.dtype(dtype) for dtype in ("<f4", "<f8", "<i8")}
"""The dtypes of nearly all parameters and buffers, which numpy copies straight from the wire's read-only arrays."""


def read_weights(module: torch.nn.Module) -> dict[str, NDArray[Any]]:
    """Return copies of all parameters and buffers of the state dict."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in module.state_dict().items()}


def check_weights(module: torch.nn.Module, state: Mapping[str, NDArray[Any] | torch.Tensor]) -> None:
    """Raise `WeightsMismatchError` unless `state` has the names and shapes of the module's parameters and buffers."""
    check_shapes({name: array.shape for name, array in state.items()}, weight_shapes(module))


def weight_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter and buffer of the state dict."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def write_weights(module: torch.nn.Module, state: Mapping[str, NDArray[Any] | torch.Tensor]) -> None:
    """Copy `state` into the module's own memory. Copies nothing if it raises `ModuleError`."""
    check_weights(module, state)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            _write(tensor, state[name])


def weights_by_module(state: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return {module id: its arrays} from the weights given to a runner of `modules`.

    `state` may be:

    - that mapping already
    - arrays under names joined by `schemas.messages.weights.join_modules`
    - the arrays of the only module there is

    Raises `WhichModuleError` for an unknown module, or for arrays that do not say which module they belong to.
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


def _write(tensor: torch.Tensor, given: NDArray[Any] | torch.Tensor) -> None:
    """Copy `given` into `tensor`, by numpy where both have the same dtype and are in the processor's memory."""
    if isinstance(given, torch.Tensor):  # as in `module.state_dict()`
        tensor.copy_(given)
    elif tensor.device.type == "cpu" and _DTYPES.get(tensor.dtype) == given.dtype:
        np.copyto(tensor.numpy(), given)
    else:
        # Torch warns about read-only arrays, as those from the wire are.
        tensor.copy_(torch.from_numpy(np.array(given)))
