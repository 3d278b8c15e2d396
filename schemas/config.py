"""The configuration of a fleet: sections of frozen values, each validated when built.

`config_loading.py` finds where the values come from; `deploy/fleet.toml` shows every key.
"""

from __future__ import annotations

import ipaddress
import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.schemas.config_section import ConfigSection
from headrace.schemas.recorder import WINDOW
from headrace.schemas.sampling_settings import SamplingSettings
from headrace.schemas.serving_settings import ServingSection

LEAST_WINDOW = 4
_HIGHEST_PORT = 65_535
DEFAULT_WINDOW = 16
"""Batches in a worker's window when the learner's need, or the length of batches, is not known."""


class FleetSection(ConfigSection):
    """Settings of the fleet as a whole."""

    workers: int = Field(
        default=2,
        ge=0,
        le=1000,  # the broker gives slots from 1000 on to workers that were started alone
        description="sampler processes `up` starts on this machine",
    )
    env_hosts: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="env hosts `up` starts on this machine too, shared out among the workers; for env_placement remote",
    )
    run_dir: str = Field(
        default="",
        description="folder for fleet.json, logs, recorders, checkpoints and Redis data; empty: `up` makes "
        "runs/ENV-TIME, and other commands take the newest run in runs/",
    )
    check_env: bool = Field(
        default=True,
        description="build one env in a process of its own before anything starts; false: only look up what is named",
    )
    until_return: float | None = Field(
        default=None, description="stop when the mean return of the last 100 episodes reaches this"
    )
    until_steps: int | None = Field(
        default=None,
        gt=0,
        description="stop after this many env steps, counted from the start of the run or of its resume",
    )
    timeout_s: float | None = Field(
        default=None, gt=0, description="give up after this many seconds with exit code 17 (TIMEOUT)"
    )
    fleet_id: str = Field(
        default="", pattern=r"^[A-Za-z0-9_.-]*$", description="name of the fleet; empty makes one per run directory"
    )


class SamplingSection(SamplingSettings):
    """Settings of sampling, for every worker."""

    env: str = Field(
        default="CartPole-v1", min_length=1, description='a registered gymnasium id, or "package.module:make_env"'
    )


class ModuleSection(ConfigSection):
    """The policy module. Workers and the learner build it by the same name."""

    build: str = Field(
        default="headrace.workers.modules:actor_critic", description='what builds the module, as "package.module:build"'
    )
    config: dict[str, Any] = Field(default={}, description="keyword arguments of build")


class WorkerSection(ConfigSection):
    """Settings of a worker's connection to the broker."""

    window_batches: int | None = Field(
        default=None,
        ge=1,
        le=WINDOW - 1,
        description="batches a worker keeps until they are settled; absent: the window follows the learner's updates",
    )
    window_bytes: int = Field(
        default=256 << 20, ge=1, description="bytes a worker keeps until they are settled; one batch is always allowed"
    )
    random_actions_before_weights: bool = Field(
        default=False, description="sample at random until the first weights arrive"
    )
    connect_timeout_s: float = Field(default=60.0, gt=0, description="how long to wait for a broker's first answer")
    drain_timeout_s: float = Field(default=10.0, gt=0, description="how long SIGTERM waits for batches to be accepted")


class BrokerSection(ConfigSection):
    """The broker's endpoints and limits."""

    host: str = Field(default="127.0.0.1", description="address to bind; off loopback needs [keys]")
    worker_port: int = Field(default=0, ge=0, le=65535, description="port for workers; 0 takes a free one")
    learner_port: int = Field(default=0, ge=0, le=65535, description="port for learners; 0 takes a free one")
    weights_port: int = Field(default=0, ge=0, le=65535, description="port that relays weights; 0 takes a free one")
    allow_insecure: bool = Field(
        default=False, description="serve other machines without keys and unencrypted; every start warns"
    )
    max_batch_bytes: int = Field(default=128 << 20, ge=1 << 16, description="largest batch accepted")
    max_held_bytes: int = Field(
        default=1 << 30, ge=1 << 20, description="bytes held until committed; workers wait beyond that"
    )
    overflow: Literal["block", "drop_oldest", "drop_stale"] = Field(
        default="block",
        description="what happens when max_held_bytes are held: wait, or drop the oldest or the stale batches",
    )
    max_staleness: int = Field(
        default=8,
        ge=1,
        description="with overflow drop_stale: how many weights versions behind the newest a batch may be",
    )
    ack: Literal["learner", "broker"] = Field(
        default="learner", description="whose acknowledgement lets a worker forget a batch"
    )
    lease_s: float = Field(default=10.0, gt=0, description="silence after which a worker counts as lost")
    heartbeat_interval_s: float = Field(default=1.0, gt=0, description="time between two heartbeats of a peer")
    report_interval_s: float = Field(default=0.5, gt=0, description="time between reports of the broker to Redis")

    @model_validator(mode="after")
    def _check(self) -> BrokerSection:
        if self.lease_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"lease_s = {self.lease_s} must be at least twice heartbeat_interval_s = {self.heartbeat_interval_s}"
            )
        if self.max_batch_bytes > self.max_held_bytes:
            raise ValueError(f"max_batch_bytes = {self.max_batch_bytes} exceeds max_held_bytes = {self.max_held_bytes}")
        ports = [port for port in (self.worker_port, self.learner_port, self.weights_port) if port]
        if len(set(ports)) < len(ports):
            raise ValueError(
                f"worker_port = {self.worker_port}, learner_port = {self.learner_port} and weights_port = "
                f"{self.weights_port} must differ (0 takes a free one)"
            )
        return self


def is_loopback(host: str) -> bool:
    """Return whether a broker that binds `host` can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class LearnerSection(ConfigSection):
    """Settings of the reference PPO learner.

    The defaults take CartPole-v1 to a sampled return of 475 in some 100,000 steps.
    """

    enabled: bool = Field(default=True, description="false: `up` starts no learner; connect your own EpisodeStream")
    steps_per_update: int = Field(default=2048, gt=0, description="agent steps gathered for one PPO update")
    epochs: int = Field(default=10, gt=0, description="passes over the steps of one update, at most")
    minibatch_size: int = Field(default=256, gt=0, description="steps of one gradient step")
    learning_rate: float = Field(default=1e-3, gt=0, description="learning rate of Adam")
    gamma: float = Field(default=0.98, gt=0, le=1, description="discount of rewards, for each step")
    gae_lambda: float = Field(default=0.9, ge=0, le=1, description="lambda of generalised advantage estimation")
    clip: float = Field(default=0.2, gt=0, description="bound of PPO's ratio: it is clipped to 1 - clip and 1 + clip")
    value_coefficient: float = Field(default=0.5, ge=0, description="weight of the value loss")
    entropy_coefficient: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    max_grad_norm: float = Field(default=0.5, gt=0, description="norm to which the gradient is clipped")
    target_kl: float = Field(
        default=0.03,
        gt=0,
        description="divergence at which an update stops after its current epoch; 1e9: never",
    )
    policies_to_train: list[str] | None = Field(
        default=None, description="module ids to train; absent: all. The others stay frozen as they were built"
    )
    evaluate_every_steps: int = Field(
        default=0,
        ge=0,
        description="agent steps trained on between two evaluations of the newest checkpoint, by a process of its own "
        "that `up` starts; 0: none",
    )
    evaluate_episodes: int = Field(default=10, ge=1, description="whole episodes of one such evaluation")
    seed: int = Field(default=0, ge=0, description="root of the learner's random numbers")
    torch_threads: int = Field(default=1, gt=0, description="threads that torch may use in the learner")


class RedisSection(ConfigSection):
    """The Redis that the fleet reports to."""

    url: str = Field(
        default="",
        description="address, redis://[:password@]host:port/db; empty: the fleet starts its own in the run directory",
    )


class KeysSection(ConfigSection):
    """Keys of the fleet's sockets; `schemas/keys.py` describes the files."""

    dir: str = Field(
        default="",
        description="folder that `headrace keys init` made, or a copy of this machine's part; empty: no keys",
    )

    @field_validator("dir")
    @classmethod
    def _absolute(cls, folder: str) -> str:
        """Make the folder absolute, so that it is the same for every process of the fleet."""
        return str(Path(folder).expanduser().absolute()) if folder else ""


class SupervisorSection(ConfigSection):
    """Settings of the supervisor, by which `up` keeps its processes alive."""

    restart_backoff_s: float = Field(
        default=0.2, gt=0, description="pause before the first restart; it doubles each time, with jitter"
    )
    restart_backoff_max_s: float = Field(default=10.0, gt=0, description="longest pause before a restart")
    max_restarts_per_window: int = Field(
        default=10, ge=0, description="restarts of one process before it counts as crash-looping"
    )
    restart_window_s: float = Field(default=60.0, gt=0, description="time window of max_restarts_per_window")
    zombie_grace_s: float = Field(
        default=30.0, gt=0, description="how long a silent worker that was replaced may live on, to find itself fenced"
    )
    stop_timeout_s: float = Field(default=20.0, gt=0, description="how long a draining process has before it is killed")


class LoggingSection(ConfigSection):
    """Settings of what `up` logs of a run. It always writes `metrics.jsonl` and `metrics.csv` in the run directory."""

    interval_s: float = Field(default=5.0, gt=0, description="time between two rows about the whole fleet")
    tensorboard: bool = Field(
        default=False, description="log to TensorBoard files too, in run_dir/tensorboard (extra tensorboard)"
    )
    wandb: bool = Field(default=False, description="log to Weights & Biases too (extra wandb)")
    mlflow: bool = Field(default=False, description="log to MLflow too (extra mlflow)")
    loggers: list[str] = Field(
        default=[], description='loggers of your own, each as "package.module:Class", which is called with a RunInfo'
    )


class FleetConfig(ConfigSection):
    """The whole configuration: all sections."""

    fleet: FleetSection = FleetSection()
    sampling: SamplingSection = SamplingSection()
    module: ModuleSection = ModuleSection()
    worker: WorkerSection = WorkerSection()
    broker: BrokerSection = BrokerSection()
    learner: LearnerSection = LearnerSection()
    redis: RedisSection = RedisSection()
    keys: KeysSection = KeysSection()
    supervisor: SupervisorSection = SupervisorSection()
    serving: ServingSection = ServingSection()
    logging: LoggingSection = LoggingSection()

    @model_validator(mode="after")
    def _check(self) -> FleetConfig:
        host = self.broker.host
        if not (self.keys.dir or self.broker.allow_insecure or is_loopback(host)):
            raise ValueError(
                f"broker.host = {host!r} serves other machines: it needs keys.dir (`headrace keys init` makes keys), "
                "or 127.0.0.1, or broker.allow_insecure = true on a network you trust"
            )
        self._check_env_hosts()
        self.serving.check_slots(self.fleet.workers)
        policies = sorted(self.sampling.policies or {"default_policy"})
        unknown = sorted(set(self.learner.policies_to_train or policies) - set(policies))
        if unknown:
            raise ValueError(f"learner.policies_to_train names {unknown}; the policies are {policies}")
        self._check_evaluation()
        if self.sampling.synchronous and self.worker.random_actions_before_weights:
            raise ValueError(
                "sampling.synchronous = true has all steps sampled with the newest weights, and "
                "worker.random_actions_before_weights = true samples before there are any; leave one of them out"
            )
        window, enough = self.worker.window_batches, self._batches_for(self.learner.steps_per_update)
        if self.learner.enabled and window is not None and window < enough:
            raise ValueError(
                f"worker.window_batches = {window} keeps too little for one update of learner.steps_per_update = "
                f"{self.learner.steps_per_update}: workers and learner would wait for each other; give {enough} or more"
            )
        return self

    def _check_evaluation(self) -> None:
        every = self.learner.evaluate_every_steps
        if every and not self.learner.enabled:
            raise ValueError(
                f"learner.evaluate_every_steps = {every} evaluates checkpoints of the reference learner, and "
                "learner.enabled = false; leave one of them out"
            )
        if every and self.serving.enabled:
            raise ValueError(
                f"learner.evaluate_every_steps = {every} plays episodes of sampling.env, and serving.enabled = true: "
                "clients drive the episodes; leave one of them out"
            )

    def _check_env_hosts(self) -> None:
        hosts, workers, placement = self.fleet.env_hosts, self.fleet.workers, self.sampling.env_placement
        if hosts and placement != "remote":
            raise ValueError(
                f"fleet.env_hosts = {hosts} is for sampling.env_placement = 'remote', which is {placement!r}; leave "
                "one of them out"
            )
        if hosts and not 0 < workers <= hosts:
            raise ValueError(
                f"fleet.env_hosts = {hosts} cannot serve fleet.workers = {workers}, since each serves one worker; "
                f"take {max(workers, 1)} or more of them, or other workers"
            )
        port = self.sampling.env_hosts_port
        if placement == "remote" and port and port + workers - 1 > _HIGHEST_PORT:
            raise ValueError(
                f"sampling.env_hosts_port = {port} leaves no port for each of fleet.workers = {workers}: the slot is "
                f"added to it, up to {_HIGHEST_PORT}; lower it"
            )

    @property
    def _modules(self) -> int:
        """Return the number of modules; a cut gives one batch for each."""
        return len(self.sampling.policies or ("default_policy",))

    def window_batches(self) -> int:
        """Return how many batches a worker keeps until they are settled, as long as the learner tells no size.

        A small window means fresh data: a worker that may not run ahead samples with newer weights.
        """
        if self.worker.window_batches is not None:
            return self.worker.window_batches
        if not self.learner.enabled or self.sampling.batch_mode != "truncate_episodes":
            return min(DEFAULT_WINDOW * self._modules, WINDOW - 1)
        least, enough = LEAST_WINDOW * self._modules, self._batches_for(2 * self.learner.steps_per_update)
        return min(max(least, enough), WINDOW - 1)

    def window_steps(self) -> int:
        """Return how many steps a window's batches have when they are full.

        Batches are small while envs are down, and then the worker keeps more of them. 0 where the user set the number
        of batches, or where batches vary.
        """
        if self.worker.window_batches is not None or self.sampling.batch_mode != "truncate_episodes":
            return 0
        return self.window_batches() // self._modules * self._cut_steps

    def window_env_steps(self) -> int | None:
        """Return the most env steps that a worker may have under way; None where batches vary.

        It is one cut more than the window has: batches that are smaller leave room for it.
        """
        if self.sampling.batch_mode != "truncate_episodes":
            return None
        return (self.window_batches() // self._modules + 1) * self._cut_steps

    @property
    def _cut_steps(self) -> int:
        """Return the env steps of a cut while all envs are up."""
        return self.sampling.num_envs * self.sampling.rollout_fragment_length

    def _batches_for(self, steps: int) -> int:
        """Return how many batches each worker must have under way for `steps` of the fleet.

        A cut gives one batch for each module.

        Agents that act together make more steps of a cut than this counts. 1 where batches vary.
        """
        if self.sampling.batch_mode != "truncate_episodes":
            return 1
        return math.ceil(steps / (self._cut_steps * max(1, self.fleet.workers))) * self._modules
