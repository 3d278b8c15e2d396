"""The known name that an unknown one most likely means."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

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

_KEPT_BY_WORKERS = "workers keep each batch until the learner has committed it"
_IN_DQN = "docs/examples/dqn.py, a DQN on the public API, has a constant for it"
_A_LOGGER = 'logging.loggers names it: loggers = ["{}"]'
CUT: dict[str, tuple[Any, str]] = {
    "broker.ack": ("learner", _KEPT_BY_WORKERS),
    "broker.heartbeat_interval_s": (1.0, "it is 1 s, or a tenth of broker.lease_s where that is less"),
    "broker.learner_port": (0, "learners have the port after broker.port"),
    "broker.log": (False, _KEPT_BY_WORKERS),
    "broker.log_max_bytes": (4 << 30, _KEPT_BY_WORKERS),
    "broker.log_when_full": ("stop", _KEPT_BY_WORKERS),
    "broker.max_connections": (4096, "each port takes 4,096 connections"),
    "broker.max_held_age_s": (None, "broker.max_staleness bounds the age of batches, in versions of the weights"),
    "broker.weights_port": (0, "weights have the second port after broker.port"),
    "broker.worker_port": (0, "broker.port has its place, and learners and weights have the two ports after it"),
    "fleet.scratch_dir": ("", "give `headrace worker --count` the option --scratch-dir"),
    "learner.algorithm": (
        "ppo",
        "the reference learner trains by PPO, and docs/examples/ of the repository has dqn.py and impala.py",
    ),
    "learner.anneal_steps": (None, "learning_rate and clip stay as they are"),
    "learner.anneal_to": (0.0, "learning_rate and clip stay as they are"),
    "learner.buffer_size": (100_000, _IN_DQN),
    "learner.evaluate_episodes": (10, "an evaluation has 10"),
    "learner.exploration_final": (0.02, _IN_DQN),
    "learner.exploration_steps": (10_000, _IN_DQN),
    "learner.gradient_steps_per_step": (0.25, _IN_DQN),
    "learner.learning_starts": (1_000, _IN_DQN),
    "learner.n_step": (3, _IN_DQN),
    "learner.target_update_interval": (200, _IN_DQN),
    "learner.value_clip": (None, "values are not clipped"),
    "logging.max_file_bytes": (16 << 20, "it is 16 MiB"),
    "logging.mlflow": (False, _A_LOGGER.format("mlflow")),
    "logging.tensorboard": (False, _A_LOGGER.format("tensorboard")),
    "logging.wandb": (False, _A_LOGGER.format("wandb")),
    "ray.cpus_per_worker": (1.0, "a worker has 1"),
    "sampling.env_close_timeout_s": (5.0, "it is 5 s"),
    "sampling.env_construct_timeout_s": (120.0, "a construction may take twice env_reset_timeout_s"),
    "sampling.env_hosts_allow_insecure": (False, "broker.allow_insecure holds for them too"),
    "sampling.env_hosts_host": ("127.0.0.1", "workers listen on all addresses where broker.host is off loopback"),
    "sampling.env_hosts_lease_s": (10.0, "it is broker.lease_s"),
    "sampling.env_hosts_timeout_s": (None, "workers wait for ever"),
    "sampling.env_restart_backoff_max_s": (5.0, "waits grow to 5 s"),
    "sampling.env_restart_backoff_s": (0.05, "waits grow from 0.05 s to 5 s"),
    "sampling.env_restart_window_s": (60.0, "it is 60 s"),
    "sampling.external_action_timeout_s": (300.0, "get_action() waits 300 s for the sampler"),
    "sampling.external_log_timeout_s": (60.0, "log_action() waits 300 s for the sampler"),
    "sampling.external_silence_timeout_s": (300.0, "sample() waits 300 s for a call"),
    "sampling.external_start_timeout_s": (60.0, "start_episode() waits 300 s for a place"),
    "sampling.max_env_restarts_per_window": (600, "it is 75 times env_restart_attempts in 60 s"),
    "sampling.max_idle_env_steps": (10_000, "it is 10,000"),
    "serving.allow_insecure": (False, "broker.allow_insecure counts for serving too"),
    "serving.http_hosts": ([], "a server with http.token in keys.dir answers by any name"),
    "serving.http_max_connections": (1024, "there are 1,024"),
    "serving.http_token": ("", "it is http.token of keys.dir"),
    "serving.max_sessions": (1024, "there are 1,024"),
    "slurm.env_host_options": ([], "slurm.options has those of all jobs, and slurm.head_options those of the head"),
    "slurm.worker_options": ([], "slurm.options has those of all jobs, and slurm.head_options those of the head"),
    "supervisor.max_restarts_per_window": (10, "supervisor.restart_attempts has its place"),
    "supervisor.restart_backoff_max_s": (10.0, "pauses grow from 0.2 s to 10 s"),
    "supervisor.restart_backoff_s": (0.2, "pauses grow from 0.2 s to 10 s"),
    "supervisor.restart_window_s": (60.0, "it is 60 s"),
    "supervisor.stop_signal": ("SIGTERM", "it is SIGINT in a job of Slurm, and SIGTERM elsewhere"),
    "supervisor.zombie_grace_s": (30.0, "it is three times broker.lease_s"),
    "worker.drain_timeout_s": (10.0, "it is 10 s"),
    "worker.window_bytes": (256 << 20, "it is a quarter of broker.max_held_bytes"),
}
"""A setting that only earlier versions had -> its default, and what takes its place."""

CARRIED = {
    "broker.worker_port": "port",
    "logging.mlflow": "loggers",
    "logging.tensorboard": "loggers",
    "logging.wandb": "loggers",
    "supervisor.max_restarts_per_window": "restart_attempts",
}
"""A cut setting of a run -> the setting of the same section that takes over its value; a list takes over its name."""


def instead_of_cut(key: str) -> str:
    """Return the end of an error about a setting that only earlier versions had; "" for any other."""
    return f", which only earlier versions had: {CUT[key][1]}; delete it" if key in CUT else ""


def nearest_name(given: str, known: Collection[str], cutoff: float) -> str | None:
    """Return the known name that `given` means in another library, or else the one spelt most like it.

    Of a dotted name, only the last part is looked up among other libraries' names. `cutoff` is that of `difflib`: 0
    gives the nearest of all, and above it None is possible.
    """
    for ours in _MEANT.get(given.rpartition(".")[2], ()):
        for name in known:
            if name.rpartition(".")[2] == ours:
                return name
    close = difflib.get_close_matches(given, known, n=1, cutoff=cutoff)
    return close[0] if close else None
