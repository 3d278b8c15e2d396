"""Log-probs and values of a batch by the weights that a learner has now, beside the log-probs by those that acted.

Where weights are published while workers sample, those that acted are older than those that an update starts from.
Hilton et al., Batch size-invariance for policy optimization (2022), tell the two policies apart: a trust region is one
around the latter, and importance weights are by the former.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headrace.learner_stub.rollouts.interruption import NO_INTERRUPTION
from headrace.learner_stub.rollouts.minibatches import forward_all, minibatches_for
from headrace.learner_stub.rollouts.rollout import Rollout, chosen
from headrace.learner_stub.rollouts.tensors import to_torch
from headrace.schemas.basics.tensor_array import array_of
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import LOOKBACK
from headrace.schemas.errors import ModuleError


def with_own_logp(module: Any, batch: ChunkBatch) -> ChunkBatch:
    """Return the steps of `batch` that a policy chose, with what `module` says of them as it is now.

    Call it for all batches of an update just before the first epoch. These columns are new and have no lookback; the
    others stay as they are:

    - logp: float32 (N,), of the actions taken. action_dist_inputs: (N, ...), unless N is 0.
    - behaviour_logp: what `logp` was before, by the weights that acted; absent where the batch had none.
    - values, next_values: float32 (N,), of the observations before and after each step, as `gae` takes them.

    End markers, random actions and those that an env logged are left out, as no policy chose them. A recurrent module
    runs over each chunk from the state that came with it. The module is asked in `eval` mode, as workers ask it, on its
    own device; nothing in it changes.

    Raises `ModuleError` for a module without `forward_train` or `logp`, or whose answers have other shapes, and for
    steps of action chunks.
    """
    if missing := [name for name in ("forward_train", "logp") if not hasattr(module, name)]:
        raise ModuleError(
            f"{type(module).__name__} has no {' and no '.join(missing)}; with_own_logp calls "
            'forward_train({"obs": ...}) and logp(dist_inputs, actions)'
        )
    batch = chosen(batch)
    before = {"behaviour_logp": batch.columns["logp"]} if "logp" in batch.columns else {}
    if not batch.steps:
        none = dict.fromkeys(("logp", "values", "next_values"), np.zeros(0, np.float32))
        return _with(batch, {**before, **none})
    episodes = batch.episodes()
    rows = episodes.step_rows
    device = next((tensor.device for tensor in module.state_dict().values()), None)
    obs, actions, state_in = (to_torch(part, device) for part in (episodes.obs, episodes.actions, episodes.state_in))
    rollout = Rollout(episodes, obs, actions, torch.empty(0), state_in)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        dist_inputs, values = forward_all(module, minibatches_for(module, rollout), NO_INTERRUPTION)
        dist_inputs = dist_inputs[torch.from_numpy(rows)]
        with torch.no_grad():
            logp = module.logp(dist_inputs, actions)
    finally:
        for part, training in modes:
            part.training = training
    if logp.shape != (batch.steps,):
        raise ModuleError(f"logp returned {tuple(logp.shape)} for {batch.steps} steps; it must be one number a step")
    own = values.astype(np.float32)
    made = {"logp": array_of(logp.float()), "values": own[rows], "next_values": own[rows + 1]}
    return _with(batch, {**before, **made, "action_dist_inputs": array_of(dist_inputs)})


def _with(batch: ChunkBatch, made: dict[str, Any]) -> ChunkBatch:
    """Return `batch` with the columns `made`, without what it has of these names, also in the lookback."""
    kept = {name: array for name, array in batch.arrays.items() if name.removeprefix(LOOKBACK) not in made}
    return replace(batch, arrays=kept | made)
