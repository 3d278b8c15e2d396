"""Adam: gradient descent by running means of each gradient and of its square.

Kingma and Ba, Adam: A Method for Stochastic Optimization (2015), algorithm 1, with the rates of decay given there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

_MEANS = ("exp_avg", "exp_avg_sq")


class Adam:
    """The steps of `torch.optim.Adam`, by torch's function, with the learning rate `lr`.

    Creating one of torch's own optimizers imports torch's compiler: a second of a learner's start, and 74 MB.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, eps: float) -> None:
        self._parameters = dict(enumerate(parameters))
        self._lr, self._eps = lr, eps
        self._state: dict[int, dict[str, Tensor]] = {}
        """By the place of each parameter that has had a gradient: "step", "exp_avg" and "exp_avg_sq"."""

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move each parameter that has a gradient."""
        gradients = {place: own.grad for place, own in self._parameters.items() if own.grad is not None}
        for place in gradients.keys() - self._state.keys():
            self._state[place] = _zeros(self._parameters[place])
        states = [self._state[place] for place in gradients]
        adam(
            [self._parameters[place] for place in gradients],
            [*gradients.values()],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,  # one call for all parameters
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self._lr,
            weight_decay=0.0,
            eps=self._eps,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return {"state": {place: {"step", "exp_avg", "exp_avg_sq"}}}; the tensors are live."""
        return {"state": self._state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a copy of the result of `state_dict`. Raises `KeyError` or `RuntimeError` for other parameters."""
        self._state = {
            place: {name: zero.copy_(of[name]) for name, zero in _zeros(self._parameters[place]).items()}
            for place, of in state_dict["state"].items()
        }


def _zeros(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state before the first step. The means lie in memory as the parameter does, as `adam` needs them."""
    return {"step": torch.zeros((), device=parameter.device)} | {name: torch.zeros_like(parameter) for name in _MEANS}
