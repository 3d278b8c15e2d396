"""A module's weights as arrays by name, and back into the module in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.basics.tensor_array import BIT_DTYPES, bits_of, dtype_name, tensor_of, widened
from headrace.schemas.errors import WeightsMismatchError, which_module_error
from headrace.schemas.messages.weights import check_shapes, fit_names, split_modules
from headrace.workers.envs.bounds import holds, whole_array

_DTYPES = {torch.from_numpy(np.empty(0, dtype)).dtype: np.dtype(dtype) for dtype in ("<f2", "<f4", "<f8", "<i8")}
_DTYPES |= {getattr(torch, name): dtype for name, dtype in BIT_DTYPES.items() if hasattr(torch, name)}
"""The dtypes of nearly all parameters and buffers, which numpy copies straight from the wire's read-only arrays."""


State = Mapping[str, NDArray[Any] | torch.Tensor]
"""Arrays or tensors by name."""


def read_weights(module: torch.nn.Module) -> dict[str, NDArray[Any]]:
    """Return copies of all parameters and buffers of the state dict; bfloat16 and float8 as float32."""
    return {name: widened(bits_of(tensor).copy()) for name, tensor in module.state_dict().items()}


def check_weights(module: torch.nn.Module, state: State) -> None:
    """Raise `WeightsMismatchError` unless `state` fits the module's parameters and buffers, as `write_weights` does."""
    _fit(module.state_dict(), state)


def write_weights(module: torch.nn.Module, state: State) -> None:
    """Copy `state` into the module's own memory. Copies nothing if it raises `WeightsMismatchError`.

    Names may have the parts that wrappers put into them. Shapes are the module's. Floats of any width are cast to the
    module's; for float8, and numbers that are no floats, only where they keep their value.
    """
    write_tensors(module.state_dict(), state)


def write_tensors(own: Mapping[str, torch.Tensor], state: State) -> None:
    """Do what `write_weights` does, into a module's `own` tensors by name."""
    fitting = _fit(own, state)
    for name, tensor in own.items():
        _write(tensor, fitting[name])


def _fit(own: Mapping[str, torch.Tensor], state: State) -> State:
    """Return `state` under the names of a module's `own` tensors. Raises `WeightsMismatchError` if it does not fit."""
    state = fit_names(state, own)
    if own.keys() != state.keys() or any(tensor.shape != state[name].shape for name, tensor in own.items()):
        check_shapes(_shapes(state), _shapes(own))
    differ = {
        name: (_kind(state[name]), _kind(tensor))
        for name, tensor in own.items()
        if not (_DTYPES.get(tensor.dtype) == state[name].dtype and type(state[name]) is np.ndarray)
        and not _keeps_numbers(state[name], tensor.dtype)
    }
    if differ:
        raise WeightsMismatchError([], [], {}, dtypes=differ)
    return state


def _kind(given: NDArray[Any] | torch.Tensor) -> str:
    return "masked " * np.ma.is_masked(given) + dtype_name(given.dtype)


def _keeps_numbers(given: NDArray[Any] | torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a cast to `dtype` changes no more than the rounding of floats, none of which becomes infinite."""
    try:
        tensor = _tensor(given)
        if tensor.is_meta or tensor.layout is not torch.strided:
            return False
        if tensor.dtype == dtype:
            return True
        if tensor.dtype.is_floating_point and dtype.is_floating_point:
            cast, wide = tensor.to(dtype), tensor.double()
            if dtype.itemsize == 1:  # float8: a cast may turn what is too large into the largest number
                return bool((cast.double().nan_to_num() == wide.nan_to_num()).all())
            return bool((cast.isfinite() == wide.isfinite()).all())
    except (TypeError, ValueError, RuntimeError):  # torch has no such dtype, or no arithmetic for it
        return False
    if not (_is_whole(tensor.dtype) and _is_whole(dtype)):
        return False
    return holds(np.dtype(dtype_name(dtype)), tensor.cpu().numpy())


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in state.items()}


def weights_by_module(state: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return {module id: its arrays} from the weights given to a runner of `modules`.

    `state` may be:

    - that mapping already
    - arrays under names joined by `schemas.messages.weights.join_modules`
    - the arrays of the only module there is

    Raises `ModuleError` for an unknown module, or for arrays that do not say which module they belong to.
    """
    if all(isinstance(value, Mapping) for value in state.values()):
        given = dict(state)
    elif (split := split_modules(state)) is not None:
        given = dict(split)
    elif len(modules) == 1:
        given = {modules[0]: state}
    else:
        raise which_module_error(None, modules)
    for module_id in given:
        if module_id not in modules:
            raise which_module_error(module_id, modules)
    return given


def _write(tensor: torch.Tensor, given: NDArray[Any] | torch.Tensor) -> None:
    """Copy `given` into `tensor`, by numpy where both have the same dtype and are in the processor's memory."""
    if not isinstance(given, torch.Tensor) and tensor.is_cpu and _DTYPES.get(tensor.dtype) == given.dtype:
        np.copyto(bits_of(tensor), given)
        return
    with torch.no_grad():
        tensor.copy_(_tensor(given))


def _tensor(given: NDArray[Any] | torch.Tensor) -> torch.Tensor:
    """Return `given` as a tensor. Raises `ValueError` for masked elements, and `TypeError` for dtypes torch lacks."""
    if isinstance(given, torch.Tensor):
        return given
    array = whole_array(given)
    # A copy: torch warns about read-only arrays, as those from the wire are, and reads only native byte order.
    tensor: torch.Tensor = tensor_of(np.array(array, array.dtype.newbyteorder("=")))
    return tensor
