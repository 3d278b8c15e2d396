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
    "disable_env_checking": ("strict_bounds",),
    # of earlier versions
    "drain_timeout_s": ("stop_timeout_s",),
    "env_construct_timeout_s": ("env_reset_timeout_s",),
    "env_hosts_lease_s": ("lease_s",),
    "heartbeat_interval_s": ("lease_s",),
    "max_env_restarts_per_window": ("env_restart_attempts",),
    "max_held_age_s": ("max_staleness",),
    "max_restarts_per_window": ("restart_attempts",),
    "mlflow": ("loggers",),
    "tensorboard": ("loggers",),
    "transport": ("host",),
    "wandb": ("loggers",),
    "window_bytes": ("max_held_bytes",),
    "learner_port": ("port",),
    "weights_port": ("port",),
    "worker_port": ("port",),
    "zombie_grace_s": ("lease_s",),
}
"""A name that another library, or an earlier version, has for a setting -> our name, the first that is known."""

REMOVED = frozenset(
    """
    ack algorithm anneal_steps anneal_to buffer_size cpus_per_worker env_close_timeout_s env_host_options
    env_hosts_allow_insecure env_hosts_host env_hosts_timeout_s env_restart_backoff_max_s env_restart_backoff_s
    env_restart_window_s evaluate_episodes exploration_final exploration_steps external_action_timeout_s
    external_log_timeout_s external_silence_timeout_s external_start_timeout_s gradient_steps_per_step
    http_max_connections http_hosts http_token learning_starts log log_max_bytes log_when_full max_connections
    max_file_bytes max_idle_env_steps max_sessions n_step restart_backoff_max_s restart_backoff_s restart_window_s
    scratch_dir stop_signal target_update_interval value_clip worker_options
    """.split()  # noqa: SIM905 - a list would take 47 lines
)
"""Settings of earlier versions that have no successor: a constant took their place, or their part is gone."""


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
