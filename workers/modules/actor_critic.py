"""The default policy: an actor-critic for every space that Headrace supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from headrace.schemas.basics.tensor_array import wide_array_of
from headrace.schemas.chunks.spaces import Box, Discrete, Spaces, column_dtype
from headrace.schemas.errors import ModuleError
from headrace.workers.envs.action_masks import ActionMask
from headrace.workers.modules.distributions import ActionDistribution, Gaussian
from headrace.workers.modules.encoders import Encoder, is_plain_vector
from headrace.workers.modules.layers import KeptLayers, linear, mlp
from headrace.workers.modules.split_acts import ChoiceAct, GaussianAct
from headrace.workers.policy.module_protocol import NumpyAct

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


def actor_critic(
    spaces: Spaces,
    *,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
    vf_share_layers: bool = True,
    log_std: float = 0.0,
    seed: int = 0,
) -> ActorCritic:
    """Build an `ActorCritic`.

    `seed` alone decides its initial weights; `log_std` is the initial log standard deviation of a Gaussian. Raises
    `ModuleError` for an unknown activation or a layer without units.
    """
    if activation not in _ACTIVATIONS:
        raise ModuleError(f"activation {activation!r} is unknown; choose one of {', '.join(_ACTIVATIONS)}")
    if any(size < 1 for size in hidden):
        raise ModuleError(f"hidden = {tuple(hidden)} has a layer without units; give positive sizes")
    return ActorCritic(spaces, tuple(hidden), activation, vf_share_layers, log_std, seed)


class ActorCritic(nn.Module):
    """Encoder, MLP, and heads for the action distribution's inputs and the value.

    An observation with an "action_mask" (`action_masks.py`) limits the choice to legal actions. With shared layers both
    heads are one linear layer, whose last output is the value. Log standard deviations of Box actions are parameters
    that do not depend on the observation.
    """

    obeys_action_mask = True

    def __init__(
        self, spaces: Spaces, hidden: tuple[int, ...], activation: str, vf_share_layers: bool, log_std: float, seed: int
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.distribution = ActionDistribution(spaces.action)
        self.noise_size: int = self.distribution.noise
        self.noise_kind: Literal["uniform", "normal"] = self.distribution.noise_kind
        self._activation = activation
        self._spaces = spaces
        self._plain = is_plain_vector(spaces.observation)
        self._mask = ActionMask.of(spaces)
        self._shared = vf_share_layers
        places = self.distribution.log_std_at
        outputs = self.distribution.inputs - len(places)
        self.encoder: Encoder = Encoder(spaces.observation, generator)
        sizes = (self.encoder.size, *hidden)
        self.trunk = mlp(sizes, _ACTIVATIONS[activation], generator)
        self.head = linear(sizes[-1], outputs + vf_share_layers, 0.01, generator)
        if vf_share_layers:
            with torch.no_grad():
                self.head.weight[-1] *= 100.0  # a value head of gain 1 beside policy outputs of gain 0.01
        else:
            self.vf_trunk = mlp(sizes, _ACTIVATIONS[activation], generator)
            self.vf_head = linear(sizes[-1], 1, 1.0, generator)
        self.log_std = nn.Parameter(torch.full((len(places),), float(log_std)), requires_grad=bool(places))
        order = [i for i in range(self.distribution.inputs) if i not in set(places)] + places
        self._order: torch.Tensor
        self.register_buffer("_order", torch.tensor(np.argsort(order)), persistent=False)

    def forward_train(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return {"action_dist_inputs": (rows, inputs), "values": (rows,)}, both with gradients.

        `batch` may have "illegal", as from `ActionMask.illegal`, where the module's observations have no mask.
        """
        features = self.encoder(batch["obs"]).to(self.log_std.dtype)
        outputs = self.head(self.trunk(features))
        if self._shared:
            inputs, values = outputs[:, :-1], outputs[:, -1]
        else:
            inputs, values = outputs, self.vf_head(self.vf_trunk(features))[:, 0]
        if self.log_std.numel():
            inputs = torch.cat((inputs, self.log_std.expand(inputs.shape[0], -1)), -1)[:, self._order]
        illegal = batch.get("illegal") if self._mask is None else self._mask.illegal(batch["obs"])
        if illegal is not None:
            inputs = self.distribution.forbid(inputs, illegal)
        return {"action_dist_inputs": inputs, "values": values}

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Sample actions, and return them with logp, values and action_dist_inputs.

        If the action space has a Box, the result also has actions_for_env.
        """
        return self._answer(batch, batch["noise"].numpy(force=True))

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of `forward_exploration`, with the distribution's mode instead of a sample."""
        return self._answer(batch, None)

    def torch_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the actions of `forward_inference`, by torch operations alone, for an export."""
        return self.distribution.mode(self.forward_train(batch)["action_dist_inputs"])

    def _answer(self, batch: dict[str, Any], noise: NDArray[Any] | None) -> dict[str, Any]:
        with torch.no_grad():
            return self.act_on(self.forward_train(batch), noise)

    def forward_outputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what `act_on` needs, on the device of the module."""
        return self.forward_train(batch)

    def act_on(self, outputs: dict[str, torch.Tensor], noise: NDArray[Any] | None) -> dict[str, Any]:
        """Return the columns of `forward_exploration`, or without noise of `forward_inference`, all on the CPU."""
        columns = self.distribution.act(wide_array_of(outputs["action_dist_inputs"]), noise)
        columns["values"] = wide_array_of(outputs["values"])
        tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
        return self.distribution.nest(tensors)

    def policy_actions(self, env_actions: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the policy's actions for which the env gets `env_actions`, as columns "actions/..."."""
        return self.distribution.policy_actions(env_actions)

    def logp(self, dist_inputs: torch.Tensor, actions: Any) -> torch.Tensor:
        """Return the log-probability (rows,) of `actions`, nested as the action space is."""
        return self.distribution.logp(dist_inputs, actions)

    def entropy(self, dist_inputs: torch.Tensor) -> torch.Tensor:
        """Return the entropy (rows,) in nats."""
        return self.distribution.entropy(dist_inputs)

    def _plain_layers(self) -> list[nn.Linear]:
        """Return the layers of the trunk, then the head; none where a layer, hook or parameter is the user's."""
        activation, layers = _ACTIVATIONS[self._activation], list(self.trunk.children())
        linears = [*(layer for layer in layers[::2] if isinstance(layer, nn.Linear)), self.head]
        known = {id(parameter) for linear in linears for parameter in linear.parameters()}
        is_plain = (
            type(self.encoder) is Encoder
            and type(self.trunk) is nn.Sequential
            and 2 * (len(linears) - 1) == len(layers)
            and all(type(layer) is activation for layer in layers[1::2])
            and all(type(linear) is nn.Linear and linear.bias is not None for linear in linears)
            and known == {id(parameter) for name, parameter in self.named_parameters() if name != "log_std"}
            and not any(part._forward_hooks or part._forward_pre_hooks for part in self.modules())
            and "forward_train" not in vars(self)
            and all(parameter.dtype is torch.float32 for parameter in self.parameters())
        )
        return linears if is_plain else []

    def numpy_act(self) -> NumpyAct:
        """Return a function that acts on arrays. For a small MLP it takes half of torch's time.

        The function reads the parameters' own memory: weights copied in place take effect at once.
        """
        linears = self._plain_layers() if self._plain and self._shared else []
        if not linears:
            return self._act_through_torch
        *layers, last = ((linear.weight.detach().numpy().T, linear.bias.detach().numpy()) for linear in linears)
        head, head_bias = last
        log_std, order = self.log_std.detach().numpy(), self._order.numpy()
        moves = bool((order != np.arange(len(order))).any())
        relu = self._activation == "relu"

        def act(columns: Mapping[str, NDArray[Any]], noise: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
            x = columns["obs"].astype(np.float32, copy=False)
            for weight, bias in layers:
                x = np.dot(x, weight)
                x += bias
                x = np.maximum(x, 0.0, out=x) if relu else np.tanh(x, out=x)
            outputs = np.dot(x, head)
            outputs += head_bias
            inputs = outputs[:, :-1]
            if len(log_std):
                means, inputs = inputs, np.empty((len(x), len(order)), np.float32)
                inputs[:, : -len(log_std)], inputs[:, -len(log_std) :] = means, log_std
                inputs = inputs[:, order] if moves else inputs
            answer = self.distribution.act(inputs, noise)
            answer["values"] = outputs[:, -1]
            return answer

        action = self._spaces.action
        usual = type(self.distribution) is ActionDistribution and "act" not in vars(self.distribution)
        if usual and isinstance(action, Discrete) and column_dtype(action) == np.intp:
            return ChoiceAct(act, KeptLayers([*layers, last], relu=relu), action)
        if usual and isinstance(action, Box):
            return GaussianAct(act, KeptLayers([*layers, last], relu=relu), log_std, Gaussian(action, "normal"))
        return act

    def _act_through_torch(
        self, columns: Mapping[str, NDArray[Any]], noise: NDArray[Any] | None
    ) -> dict[str, NDArray[Any]]:
        tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
        with torch.inference_mode():
            answer = self.forward_train({"obs": self.encoder.nest(tensors)})
        acted = self.distribution.act(wide_array_of(answer["action_dist_inputs"]), noise)
        return {**acted, "values": wide_array_of(answer["values"])}
