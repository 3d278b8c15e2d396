"""Adam: gradient descent by running means of each gradient and of its square.

Kingma and Ba, Adam: A Method for Stochastic Optimization (2015), algorithm 1, with the rates of decay given there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_DECAY, _DECAY_OF_SQUARES = 0.9, 0.999


class Adam:
    """The part of `torch.optim.Adam` that PPO needs, equal to it to the bit. Either can replace the other.

    Creating one of torch's own optimizers imports torch's compiler: a second of a learner's start, and 74 MB.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, eps: float) -> None:
        self._parameters = list(parameters)
        self._lr, self._eps = lr, eps
        self._state: dict[int, dict[str, Tensor]] = {}
        """State of each parameter that has had a gradient, by the parameter's place."""

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move each parameter that has a gradient."""
        for place, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._move(parameter, parameter.grad, self._state_of(place, parameter))

    def _state_of(self, place: int, parameter: Tensor) -> dict[str, Tensor]:
        if place not in self._state:
            means = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self._state[place] = {"step": torch.tensor(0.0), **means}
        return self._state[place]

    def _move(self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        mean, squares = state["exp_avg"], state["exp_avg_sq"]
        state["step"].add_(1)
        mean.lerp_(gradient, 1 - _DECAY)
        squares.mul_(_DECAY_OF_SQUARES).addcmul_(gradient, gradient, value=1 - _DECAY_OF_SQUARES)
        steps = state["step"].item()  # corrects for both means having begun at zero
        unbiased, unbiased_squares = 1 - _DECAY**steps, 1 - _DECAY_OF_SQUARES**steps
        deviation = (squares.sqrt() / unbiased_squares**0.5).add_(self._eps)
        parameter.addcdiv_(mean, deviation, value=-self._lr / unbiased)

    def state_dict(self) -> dict[str, Any]:
        """Return {"state": {place: {"step", "exp_avg", "exp_avg_sq"}}}, of live tensors."""
        return {"state": self._state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from the result of `state_dict`. Its tensors are this object's from now on."""
        self._state = dict(state_dict["state"])
