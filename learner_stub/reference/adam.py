"""Adam: gradient descent by running means of each gradient and of its square.

Kingma and Ba, Adam: A Method for Stochastic Optimization (2015), algorithm 1, with the rates of decay given there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace.learner_stub.rollouts.module import ClosedFormGradients

_DECAY, _DECAY_OF_SQUARES = 0.9, 0.999

_LARGE = 1 << 15
"""Numbers in a parameter above which joining costs more than it saves."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Parameters that move together, and their running means: joined if there are several, else of its shape."""

    places: list[int]
    parameters: list[nn.Parameter]
    mean: Tensor
    squares: Tensor


class Adam:
    """The part of `torch.optim.Adam` that PPO needs, equal to it to the bit. Either can replace the other.

    Creating one of torch's own optimizers imports torch's compiler: a second of a learner's start, and 74 MB.

    Small parameters move together as one vector, since each operation on a small tensor costs more than its numbers.

    - lr: the learning rate, which may change between steps.
    - vectors: parameters and gradients, if they are parts of one vector each already. Nothing is copied then.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, eps: float, vectors: ClosedFormGradients | None = None
    ) -> None:
        self._parameters, self._vectors = list(parameters), vectors
        self.lr, self._eps = lr, eps
        self._steps: dict[int, int] = {}
        """Number of steps of each parameter that has had a gradient, by the parameter's place."""
        self._means: dict[int, Tensor] = {}
        self._squares: dict[int, Tensor] = {}
        self._groups: list[_Group] = []
        self._grouped: list[int] = []
        """Places of the parameters that the groups hold."""

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move each parameter that has a gradient."""
        places = [place for place, parameter in enumerate(self._parameters) if parameter.grad is not None]
        if places != self._grouped:
            self._group(places)
        for group in self._groups:
            self._move(group)

    def _group(self, places: list[int]) -> None:
        """Form groups of parameters that have done the same number of steps; large ones stay alone."""
        together: dict[Any, list[int]] = {}
        for place in places:
            parameter = self._parameters[place]
            steps = self._steps.setdefault(place, 0)
            self._means.setdefault(place, torch.zeros_like(parameter))
            self._squares.setdefault(place, torch.zeros_like(parameter))
            alone = place if parameter.numel() > _LARGE and self._vectors is None else -1
            together.setdefault((steps, parameter.dtype, parameter.device, alone), []).append(place)
        self._groups = [self._joined(group) for group in together.values()]
        self._grouped = places

    def _joined(self, places: list[int]) -> _Group:
        parameters = [self._parameters[place] for place in places]
        mean, squares = (_join([means[place] for place in places]) for means in (self._means, self._squares))
        for means, joined in ((self._means, mean), (self._squares, squares)):
            means.update(zip(places, _parts(joined, parameters), strict=True))
        return _Group(places, parameters, mean, squares)

    def _move(self, group: _Group) -> None:
        if self._vectors is not None and self._vectors.values.shape == group.mean.shape:
            self._advance(group, self._vectors.values, self._vectors.gradient)
            return
        gradient = _join([parameter.grad for parameter in group.parameters if parameter.grad is not None])
        values = _join([parameter.data for parameter in group.parameters])
        self._advance(group, values, gradient)
        if len(group.parameters) > 1:
            for parameter, part in zip(group.parameters, _parts(values, group.parameters), strict=True):
                parameter.copy_(part)

    def _advance(self, group: _Group, values: Tensor, gradient: Tensor) -> None:
        steps = self._steps[group.places[0]] + 1
        group.mean.lerp_(gradient, 1 - _DECAY)
        group.squares.mul_(_DECAY_OF_SQUARES).addcmul_(gradient, gradient, value=1 - _DECAY_OF_SQUARES)
        # The divisors correct for both means having begun at zero.
        unbiased, unbiased_squares = 1 - _DECAY**steps, 1 - _DECAY_OF_SQUARES**steps
        deviation = (group.squares.sqrt() / unbiased_squares**0.5).add_(self._eps)
        values.addcdiv_(group.mean, deviation, value=-self.lr / unbiased)
        self._steps.update(dict.fromkeys(group.places, steps))

    def state_dict(self) -> dict[str, Any]:
        """Return {"state": {place: {"step", "exp_avg", "exp_avg_sq"}}}; the means are live tensors."""
        return {
            "state": {
                place: {
                    "step": torch.tensor(float(steps)),
                    "exp_avg": self._means[place],
                    "exp_avg_sq": self._squares[place],
                }
                for place, steps in self._steps.items()
            }
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from the result of `state_dict`. Its tensors are this object's from now on."""
        state = state_dict["state"]
        self._steps = {place: int(of["step"]) for place, of in state.items()}
        self._means = {place: of["exp_avg"] for place, of in state.items()}
        self._squares = {place: of["exp_avg_sq"] for place, of in state.items()}
        self._groups, self._grouped = [], []


def _join(tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor as it is, and several as one vector of their own memory."""
    return tensors[0] if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])


def _parts(joined: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the views of `joined`, a result of `_join`, in the shapes of `parameters`."""
    if len(parameters) == 1:
        return [joined]
    parts = torch.split(joined, [parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
