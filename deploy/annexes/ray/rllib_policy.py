"""A policy that RLlib has trained, as a module of Headrace.

In the program that has RLlib:

    from headrace.deploy.annexes.ray.rllib_policy import save_weights
    save_weights(algo.get_module().get_state(), "policy.npz")

The module in this example has no value function, so the fleet's learner starts a new one. If the state of the module of
RLlib's learner was saved instead, the fleet's learner goes on with that value function.

In the fleet's settings:

    [module]
    build = "headrace.deploy.annexes.ray.rllib_policy:build"
    config = {weights = "/shared/policy.npz"}

The file has arrays only, so nothing in it can run, and workers need neither Ray nor RLlib. It knows RLlib's default
module for vectors as observations: fully connected layers for policy and value, apart or shared. The action is
discrete, or a Box with RLlib's `free_log_std=True`: log standard deviations that do not depend on the observation. What
RLlib does by `normalize_actions` the connector `UnsquashActions` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ModuleError
from headrace.workers.modules.actor_critic import ActorCritic, actor_critic

Arrays = Mapping[str, NDArray[Any]]

_POLICY, _VALUE, _SHARED = "encoder.actor_encoder.net.mlp", "encoder.critic_encoder.net.mlp", "encoder.encoder.net.mlp"
_POLICY_HEAD, _VALUE_HEAD = "pi.net.mlp", "vf.net.mlp"
_KNOWN = (_POLICY, _VALUE, _SHARED, _POLICY_HEAD, _VALUE_HEAD)
_LOG_STD = "pi.log_std"
_UNUSED = {"pi.log_std_clip_param_const", "vf.log_std_clip_param_const"}
"""Constants that RLlib keeps beside each head. They concern continuous actions only."""
_NAME = re.compile(r"(.+)\.(\d+)\.(weight|bias)")


def save_weights(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the state of an `RLModule` of RLlib, as its `get_state()` returns it, to an .npz file."""
    arrays: dict[str, Any] = {name: np.asarray(array) for name, array in state.items()}
    np.savez(path, **arrays)


def build(spaces: Spaces, *, weights: str, activation: str = "tanh") -> ActorCritic:
    """Build the module whose weights are in the .npz file at `weights`.

    `activation` is that of RLlib's `fcnet_activation`. Raises `ModuleError` for a file that cannot be read, and for a
    policy of another kind.
    """
    arrays = _read(Path(weights))
    layers = {part: list(_layers(arrays, part)) for part in _KNOWN}
    is_shared = bool(layers[_SHARED])
    trunk = layers[_SHARED if is_shared else _POLICY]
    hidden = [len(bias) for _, bias in trunk]
    module = actor_critic(spaces, hidden=hidden, activation=activation, vf_share_layers=is_shared)
    targets = [*_linear(module.trunk), module.head]
    sources = [*trunk, *layers[_POLICY_HEAD]]
    if is_shared:
        sources[-1:] = [_beside(*sources[-1:], *layers[_VALUE_HEAD])]
    elif layers[_VALUE_HEAD]:
        targets += [*_linear(module.vf_trunk), module.vf_head]
        sources += [*layers[_VALUE], *layers[_VALUE_HEAD]]
    _load_log_std(module.log_std, arrays, weights)
    _load(targets, sources, weights)
    return module


def _read(path: Path) -> Arrays:
    """Return the arrays of the file. Raises `ModuleError` for names of another kind of module."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files if name not in _UNUSED}
    except (OSError, ValueError) as error:
        raise ModuleError(f"the weights at {path} cannot be read: {error}; write them with save_weights") from error
    layers = {name for name in arrays if (named := _NAME.fullmatch(name)) and named[1] in _KNOWN}
    strange = [name for name in arrays if name not in layers | {_LOG_STD}]
    if strange or not arrays:
        raise ModuleError(
            f"the weights at {path} are not of RLlib's default module for vectors "
            f"(it has {', '.join(strange[:3]) or 'no arrays'}); write a builder for your module: see docs/guides/policy"
        )
    return arrays


def _layers(arrays: Arrays, part: str) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield (weight, bias) of each layer of a part, in order."""
    numbers = sorted(int(named[2]) for name in arrays if (named := _NAME.fullmatch(name)) and named[1] == part)
    for number in dict.fromkeys(numbers):
        names = (f"{part}.{number}.weight", f"{part}.{number}.bias")
        if not set(names) <= arrays.keys():
            raise ModuleError(f"layer {part}.{number} lacks its weight or its bias; the layers of Headrace have both")
        yield arrays[names[0]], arrays[names[1]]


def _linear(trunk: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in trunk if isinstance(layer, nn.Linear)]


def _beside(
    policy: tuple[NDArray[Any], NDArray[Any]], value: tuple[NDArray[Any], NDArray[Any]]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the two heads as one layer, whose last output is the value."""
    return np.concatenate((policy[0], value[0])), np.concatenate((policy[1], value[1]))


def _load(targets: list[nn.Linear], sources: list[tuple[NDArray[Any], NDArray[Any]]], path: str) -> None:
    wanted = [tuple(layer.weight.shape) for layer in targets]
    found = [weight.shape for weight, _ in sources]
    if wanted != found:
        raise ModuleError(f"the layers at {path} have the shapes {found}, and the env's spaces need {wanted}")
    with torch.no_grad():
        for layer, (weight, bias) in zip(targets, sources, strict=True):
            layer.weight.copy_(torch.from_numpy(weight))
            layer.bias.copy_(torch.from_numpy(bias))


def _load_log_std(target: nn.Parameter, arrays: Arrays, path: str) -> None:
    found = arrays.get(_LOG_STD, np.zeros(0, np.float32))
    if found.shape != target.shape:
        raise ModuleError(
            f"the weights at {path} have {found.size} log standard deviations of their own, and the env's actions need "
            f"{target.numel()}; train RLlib's module with free_log_std=True for a Box, without it for other actions"
        )
    with torch.no_grad():
        target.copy_(torch.from_numpy(found))
