"""The gradients of an `ActorCritic` of plain layers in closed form: a few matrix products, without autograd.

For a small network, autograd and its many small operations take several times as long as the products. The plain twin
is `ActorCritic.forward_train` with `logp`, `entropy` and `backward`; tests compare the two.

The chain rule through a layer y = f(x W' + b), with D = dL/dy * f'(.): dL/dW = D' x, dL/db = the sum of D's rows, and
dL/dx = D W. See Goodfellow, Bengio, Courville, Deep Learning (2016), algorithm 6.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from headrace.schemas.chunks.spaces import Box, Discrete
from headrace.workers.modules.layers import BlankLinear

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


class Layer:
    """A linear layer with its activation: "tanh", "relu" or "" for none.

    It keeps the arrays of the last `forward` for `backward`.
    """

    def __init__(self, linear: nn.Linear, activation: str) -> None:
        self._weight, self._bias = linear.weight.detach(), linear.bias.detach()
        self._weight_gradient, self._bias_gradient = _gradient(linear.weight), _gradient(linear.bias)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, outputs) for `x` (rows, inputs)."""
        y = torch.addmm(self._bias, x, self._weight.t())
        if self._activation == "tanh":
            array = y.numpy()
            np.tanh(array, out=array)  # several times as fast as torch's
        elif self._activation == "relu":
            y.relu_()
        self._x, self._y = x, y
        return y

    def backward(self, by_y: Tensor) -> Tensor:
        """Write the layer's gradients for dL/dy. Return what `by_x` needs."""
        if self._activation == "tanh":
            by_y = torch.ops.aten.tanh_backward(by_y, self._y)
        elif self._activation == "relu":
            by_y = torch.ops.aten.threshold_backward(by_y, self._y, 0)
        torch.mm(by_y.t(), self._x, out=self._weight_gradient)
        torch.sum(by_y, 0, out=self._bias_gradient)
        return by_y

    def by_x(self, by_sum: Tensor) -> Tensor:
        """Return dL/dx from the result of `backward`."""
        return by_sum @ self._weight


class Chain:
    """Layers one after another."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = list(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's output."""
        for layer in self._layers:
            x = layer.forward(x)
        return x

    def backward(self, by_y: Tensor) -> None:
        """Write the gradients of all layers for dL/dy of the last one."""
        first, *others = self._layers
        for layer in reversed(others):
            by_y = layer.by_x(layer.backward(by_y))
        first.backward(by_y)


class Distribution(Protocol):
    """An action distribution with its derivatives. It keeps the arrays of the last `forward` for `backward`."""

    def rows(self, actions: Tensor) -> Tensor:
        """Return the rows that `forward` takes for `actions`."""

    def forward(self, outputs: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities, entropies), (rows,) each, for a head's `outputs` and the chosen rows."""

    def backward(self, by_logp: Tensor, by_entropy: float) -> Tensor:
        """Return dL/d(outputs). `by_entropy` is dL/d(entropy) of each row. Writes gradients of its own parameters."""


class CategoricalChoice:
    """A choice among n: d(logp of k)/d(logits) = onehot(k) - p, d(entropy)/d(logits) = -p (log p + entropy)."""

    def __init__(self, leaf: Discrete) -> None:
        self._start = leaf.start

    def rows(self, actions: Tensor) -> Tensor:
        """Return the index of each action: int64 (rows, 1)."""
        return actions.reshape(len(actions), 1).long() - self._start

    def forward(self, outputs: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities, entropies), (rows,) each."""
        self._logs, self._index = torch.log_softmax(outputs, -1), chosen
        self._shares = self._logs.exp()
        self._entropy = -(self._shares * self._logs).sum(-1)
        return self._logs.gather(-1, chosen)[:, 0], self._entropy

    def backward(self, by_logp: Tensor, by_entropy: float) -> Tensor:
        """Return dL/d(logits)."""
        by_logits = self._shares * -by_logp[:, None]
        by_logits.scatter_add_(-1, self._index, by_logp[:, None])
        if by_entropy:
            by_logits -= by_entropy * self._shares * (self._logs + self._entropy[:, None])
        return by_logits


class GaussianChoice:
    """A diagonal normal, whose log deviations are parameters.

    With z = (action - mean) / deviation: d(logp)/d(mean) = z / deviation, d(logp)/d(log deviation) = z z - 1.
    """

    def __init__(self, log_std: nn.Parameter) -> None:
        self._log_std, self._gradient = log_std.detach(), _gradient(log_std)

    def rows(self, actions: Tensor) -> Tensor:
        """Return the actions: float32 (rows, size)."""
        return actions.reshape(len(actions), -1).float()

    def forward(self, outputs: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log-densities, entropies), (rows,) each."""
        self._inverse = torch.exp(-self._log_std)
        self._z = (chosen - outputs) * self._inverse
        logp = -(0.5 * self._z * self._z + self._log_std + _HALF_LOG_TWO_PI).sum(-1)
        return logp, (self._log_std + 0.5 + _HALF_LOG_TWO_PI).sum(-1).expand(len(outputs))

    def backward(self, by_logp: Tensor, by_entropy: float) -> Tensor:
        """Return dL/d(means)."""
        weighted = self._z * by_logp[:, None]
        torch.sum(weighted * self._z - by_logp[:, None], 0, out=self._gradient)
        self._gradient += by_entropy * len(by_logp)
        return weighted * self._inverse


class ClosedForm:
    """Gradients of an actor-critic.

    - values, gradient: float32 (all numbers,), the results of `join`.
    - policy: from the features to the policy's outputs, and with shared layers to the value as the last one.
    - value: from the features to the value; None with shared layers.
    """

    def __init__(
        self, values: Tensor, gradient: Tensor, policy: Chain, value: Chain | None, choice: Distribution
    ) -> None:
        self.values, self.gradient = values, gradient
        self._policy, self._value, self._choice = policy, value, choice

    def rows(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (features, chosen), the rows that `forward` takes any part of."""
        return obs.reshape(len(obs), -1).float(), self._choice.rows(actions)

    def forward(self, features: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logp, entropy, values), (rows,) each."""
        outputs = self._policy.forward(features)
        if self._value is None:
            outputs, values = outputs[:, :-1], outputs[:, -1]
        else:
            values = self._value.forward(features)[:, 0]
        return *self._choice.forward(outputs, chosen), values

    def backward(self, by_logp: Tensor, by_entropy: float, by_values: Tensor) -> None:
        """Write the gradients of a loss L for the rows of the last `forward`.

        - by_logp, by_values: dL/d(logp) and dL/d(values), (rows,) each.
        - by_entropy: dL/d(entropy) of each row, the same for all.
        """
        by_outputs = self._choice.backward(by_logp, by_entropy)
        if self._value is None:
            by_outputs = torch.cat((by_outputs, by_values[:, None]), -1)
        else:
            self._value.backward(by_values[:, None])
        self._policy.backward(by_outputs)


def join(parameters: Iterable[nn.Parameter]) -> tuple[Tensor, Tensor]:
    """Put parameters into one vector, and their gradients into another; return both: (all numbers,) each.

    Each parameter keeps its shape and values, and becomes a view. So does its `grad`. Parameters without numbers are
    left as they are.
    """
    parts = [parameter for parameter in parameters if parameter.numel()]
    sizes = [part.numel() for part in parts]
    values = torch.cat([part.detach().reshape(-1) for part in parts])
    gradient = torch.zeros_like(values)
    for part, own, own_gradient in zip(parts, torch.split(values, sizes), torch.split(gradient, sizes), strict=True):
        part.data, part.grad = own.view(part.shape), own_gradient.view(part.shape)
    return values, gradient


def choice_of(space: Discrete | Box, log_std: nn.Parameter) -> Distribution:
    """Return the distribution over a space."""
    return CategoricalChoice(space) if isinstance(space, Discrete) else GaussianChoice(log_std)


def linears_of(trunk: nn.Module, head: nn.Linear, activation: type[nn.Module]) -> list[nn.Linear]:
    """Return the linear layers of `trunk`, then `head`; none if a layer is not followed by `activation`."""
    layers = list(trunk.children())
    linears = [layer for layer in layers[::2] if isinstance(layer, nn.Linear)]
    usual = type(trunk) is nn.Sequential and all(type(layer) is activation for layer in layers[1::2])
    return [*linears, head] if usual and 2 * len(linears) == len(layers) else []


def is_plain(module: nn.Module, layers: Iterable[Sequence[nn.Linear]]) -> bool:
    """Return whether `layers` and "log_std" are all parameters of `module`, and it has no hooks."""
    linears = [linear for some in layers for linear in some]
    named = dict(module.named_parameters(remove_duplicate=False))
    own = [id(parameter) for linear in linears for parameter in linear.parameters()]
    return (
        sorted(own) == sorted(id(parameter) for name, parameter in named.items() if name != "log_std")
        and len(set(own)) == len(own)
        and all(type(linear) in (nn.Linear, BlankLinear) and linear.bias is not None for linear in linears)
        and not any(_hooks(part) for part in module.modules())
    )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None  # made by `join`
    return parameter.grad


def _hooks(part: nn.Module) -> Any:
    return part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
