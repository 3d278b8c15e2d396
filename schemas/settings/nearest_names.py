"""The known name that an unknown one most likely means."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_MEANT = {
    # RLlib's
    "num_envs_per_env_runner": ("num_envs",),
    "num_envs_per_worker": ("num_envs",),
    "num_env_runners": ("num_workers", "workers"),
    "num_rollout_workers": ("num_workers", "workers"),
    "env_to_module_connector": ("env_to_module",),
    "module_to_env_connector": ("module_to_env",),
    "observation_filter": ("env_to_module",),
    "callbacks_class": ("callbacks",),
    "rl_module_spec": ("module", "build"),
    "train_batch_size": ("steps_per_update",),
    "train_batch_size_per_learner": ("steps_per_update",),
    "num_epochs": ("epochs",),
    "lr": ("learning_rate",),
    "lambda_": ("gae_lambda",),
    "clip_param": ("clip",),
    "vf_loss_coeff": ("value_coefficient",),
    "entropy_coeff": ("entropy_coefficient",),
    "grad_clip": ("max_grad_norm",),
    "kl_target": ("target_kl",),
    # Stable-Baselines3's
    "n_envs": ("num_envs",),
    "n_steps": ("rollout_fragment_length",),
    "n_epochs": ("epochs",),
    "batch_size": ("minibatch_size",),
    "clip_range": ("clip",),
    "vf_coef": ("value_coefficient",),
    "ent_coef": ("entropy_coefficient",),
}
"""A name that another library has for a setting -> our name, the first that is known."""


def nearest_name(given: str, known: Collection[str], cutoff: float) -> str | None:
    """Return the known name that `given` means by `_MEANT`, or else the one spelt most like it.

    Of a dotted name, only the last part is looked up there. `cutoff` is that of `difflib`: 0
    gives the nearest of all, and above it None is possible.
    """
    for ours in _MEANT.get(given.rpartition(".")[2], ()):
        for name in known:
            if name.rpartition(".")[2] == ours:
                return name
    close = difflib.get_close_matches(given, known, n=1, cutoff=cutoff)
    return close[0] if close else None
