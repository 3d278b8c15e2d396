"""A recurrent policy: the actor-critic with an LSTM between the observation and its heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from headrace.schemas.chunks.spaces import Box, Spaces
from headrace.schemas.errors import ModuleError
from headrace.workers.envs.action_masks import ActionMask
from headrace.workers.modules.actor_critic import ActorCritic
from headrace.workers.modules.encoders import Encoder
from headrace.workers.modules.layers import mlp, orthogonal


def lstm_actor_critic(
    spaces: Spaces, *, hidden: Sequence[int] = (64,), cell_size: int = 64, log_std: float = 0.0, seed: int = 0
) -> LstmActorCritic:
    """Build an `LstmActorCritic`: tanh layers of `hidden` units, then an LSTM of `cell_size`.

    `log_std` and `seed` are as in `actor_critic`. Raises `ModuleError` for sizes below 1.
    """
    if any(size < 1 for size in (*hidden, cell_size)):
        raise ModuleError(f"hidden = {tuple(hidden)}, cell_size = {cell_size}: give positive sizes")
    return LstmActorCritic(spaces, tuple(hidden), cell_size, log_std, seed)


class LstmActorCritic(nn.Module):
    """Encoder, MLP, LSTM, and the heads of an `ActorCritic`. Its state is "h" and "c", float32 (cell_size,) each."""

    obeys_action_mask = True

    def __init__(self, spaces: Spaces, hidden: tuple[int, ...], cell_size: int, log_std: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self._mask = ActionMask.of(spaces)
        self.encoder = Encoder(spaces.observation, generator)
        sizes = (self.encoder.size, *hidden)
        self.trunk = mlp(sizes, nn.Tanh, generator)
        self.lstm = _lstm(sizes[-1], cell_size, generator)
        remembered = Spaces(observation=Box(shape=(cell_size,), dtype="<f4"), action=spaces.action)
        self.heads = ActorCritic(remembered, (), "tanh", True, log_std, seed)
        self.noise_size: int = self.heads.noise_size
        self.noise_kind: Literal["uniform", "normal"] = self.heads.noise_kind

    def initial_state(self) -> dict[str, torch.Tensor]:
        """Return zeros for "h" and "c"."""
        return {name: torch.zeros(self.lstm.hidden_size) for name in ("h", "c")}

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Step every row once: return the columns of `ActorCritic` and "state_out", given "state_in"."""
        remembered, state_out = self._step(batch)
        heads = {**self._for_heads(remembered, batch["obs"]), "noise": batch["noise"]}
        return {**self.heads.forward_exploration(heads), "state_out": state_out}

    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of `forward_exploration`, with the distribution's mode instead of a sample."""
        remembered, state_out = self._step(batch)
        return {**self.heads.forward_inference(self._for_heads(remembered, batch["obs"])), "state_out": state_out}

    def forward_outputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what `act_on` needs, and "state_out", on the device of the module."""
        remembered, state_out = self._step(batch)
        return {**self.heads.forward_train(self._for_heads(remembered, batch["obs"])), "state_out": state_out}

    def act_on(self, outputs: dict[str, torch.Tensor], noise: NDArray[Any] | None) -> dict[str, Any]:
        """Return the columns of `ActorCritic.act_on`."""
        return self.heads.act_on(outputs, noise)

    def forward_train(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Run whole sequences at once, as `sequences` makes them of a batch of chunks.

        - obs: (rows, ...), sequences one after another
        - lengths: int64 (C,), the rows of each sequence
        - state_in: {"h", "c"}, each (C, ...)

        Returns {"action_dist_inputs": (rows, inputs), "values": (rows,)} in the order of `obs`, with gradients. Raises
        `ModuleError` if "state_in" or "lengths" is missing.
        """
        if "state_in" not in batch or "lengths" not in batch:
            raise ModuleError(
                "a recurrent module learns from sequences: give forward_train what "
                "headrace.workers.modules.sequences makes of a batch, with 'lengths' and 'state_in' beside 'obs'"
            )
        lengths = batch["lengths"].cpu()
        if not len(lengths):
            none = self.heads.log_std.new_zeros((0, self.lstm.hidden_size))
            return self.heads.forward_train(self._for_heads(none, batch["obs"]))
        features = self.trunk(self.encoder(batch["obs"]).to(self.heads.log_std.dtype))
        state = {name: part.to(self.heads.log_std.dtype) for name, part in batch["state_in"].items()}
        padded = nn.utils.rnn.pad_sequence(list(features.split(lengths.tolist())), batch_first=True)
        packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        remembered: PackedSequence = self.lstm(packed, (state["h"][None], state["c"][None]))[0]
        unpacked, _ = pad_packed_sequence(remembered, batch_first=True)
        rows = torch.cat([unpacked[i, :length] for i, length in enumerate(lengths.tolist())])
        return self.heads.forward_train(self._for_heads(rows, batch["obs"]))

    def policy_actions(self, env_actions: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the policy's actions for which the env gets `env_actions`, as columns "actions/..."."""
        return self.heads.policy_actions(env_actions)

    def logp(self, dist_inputs: torch.Tensor, actions: Any) -> torch.Tensor:
        """Return the log-probability (rows,) of `actions`, nested as the action space is."""
        return self.heads.logp(dist_inputs, actions)

    def entropy(self, dist_inputs: torch.Tensor) -> torch.Tensor:
        """Return the entropy (rows,) in nats."""
        return self.heads.entropy(dist_inputs)

    def _for_heads(self, remembered: torch.Tensor, obs: Any) -> dict[str, Any]:
        return {"obs": remembered} if self._mask is None else {"obs": remembered, "illegal": self._mask.illegal(obs)}

    def _step(self, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        features = self.trunk(self.encoder(batch["obs"]).to(self.heads.log_std.dtype))
        state = {name: part.to(self.heads.log_std.dtype) for name, part in batch["state_in"].items()}
        remembered, (h, c) = self.lstm(features[None], (state["h"][None], state["c"][None]))
        return remembered[0], {"h": h[0], "c": c[0]}


def _lstm(inputs: int, units: int, generator: torch.Generator) -> nn.LSTM:
    """Return an LSTM with orthogonal weights for each gate, and zero bias except 1 for the forget gate.

    This bias makes the LSTM remember at first.
    """
    with torch.random.fork_rng(devices=()):
        lstm = nn.LSTM(inputs, units)
    parameters = dict(lstm.named_parameters())
    with torch.no_grad():
        for name, size in (("weight_ih_l0", inputs), ("weight_hh_l0", units)):
            gates = [orthogonal(units, size, generator) for _ in range(4)]
            parameters[name].copy_(torch.cat(gates))
        for name in ("bias_ih_l0", "bias_hh_l0"):
            parameters[name].zero_()
        parameters["bias_ih_l0"][units : 2 * units] = 1.0
    return lstm
