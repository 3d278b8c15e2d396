"""The state dicts of a module and its optimizer as the named arrays of a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.learner_stub.checkpoints.checkpoint import MODULE


def training_arrays(module: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return both state dicts' tensors as arrays by name, sharing their memory.

    Hyperparameters are not kept: they are the config's.
    """
    tensors = {f"{MODULE}{name}": tensor for name, tensor in module.items()}
    for index, moments in optimizer["state"].items():
        tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in moments.items()}
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def training_tensors(arrays: Mapping[str, NDArray[Any]]) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Return (module state dict, optimizer's "state") from `training_arrays`, in memory of their own."""
    module: dict[str, Tensor] = {}
    optimizer: dict[int, dict[str, Tensor]] = {}
    for name, array in arrays.items():
        part, _, rest = name.partition("/")
        tensor = torch.from_numpy(array.copy())  # a file's arrays are read-only, and torch warns of those
        if part == "module":
            module[rest] = tensor
        else:
            index, _, moment = rest.partition("/")
            optimizer.setdefault(int(index), {})[moment] = tensor
    return module, optimizer
