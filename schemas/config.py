"""The one configuration of a fleet: sections of frozen values, each validated when built.

`config_loading.py` says where the values come from; `deploy/fleet.toml` shows every key.
"""

from __future__ import annotations

import ipaddress
import math
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headrace.schemas.module_spaces import check_mapping_table, check_module_ids
from headrace.schemas.recorder import WINDOW

LEAST_WINDOW = 4
DEFAULT_WINDOW = 16
"""Batches in a worker's window where it is not known how many a learner needs, or how long they are."""


class Section(BaseModel):
    """A part of the configuration; parts are handed to those who use them, never the whole tree."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FleetSection(Section):
    """The fleet as a whole."""

    workers: int = Field(
        default=2,
        ge=0,
        le=1000,  # the broker gives slots from 1000 on to workers that were started alone
        description="sampler processes `up` starts on this machine",
    )
    run_dir: str = Field(
        default="runs/default",
        min_length=1,
        description="folder for fleet.json, logs, recorders, checkpoints and Redis data",
    )
    until_return: float | None = Field(
        default=None, description="stop when the mean return of the last 100 episodes reaches this"
    )
    until_steps: int | None = Field(default=None, gt=0, description="stop after this many env steps, sampled")
    timeout_s: float | None = Field(
        default=None, gt=0, description="give up after this many seconds with exit code 17 (TIMEOUT)"
    )
    fleet_id: str = Field(
        default="", pattern=r"^[A-Za-z0-9_.-]*$", description="name of the fleet; empty makes one per run directory"
    )


Piece = str | dict[str, Any]
"""What builds a connector: see `plugins.load_factory`."""


class PolicySettings(Section):
    """One of several policies; what is absent is as in [module]."""

    build: str | None = Field(default=None, description='"package.module:build"')
    config: dict[str, Any] | None = Field(default=None, description="keyword arguments of build")
    env_to_module: list[Piece] | None = Field(default=None, description="its own, in place of [sampling]'s")
    module_to_env: list[Piece] | None = Field(default=None, description="likewise")


class SamplingSettings(Section):
    """What one runner samples, as plain values: the part of EnvRunnerConfig that a file can hold."""

    env_config: dict[str, Any] = Field(
        default={}, description="keyword arguments of a gymnasium id; the EnvContext of a callable"
    )
    num_envs: int = Field(default=8, ge=1, le=65_536, description="environments stepped together by one runner")
    gym_env_vectorize_mode: Literal["sync", "async", "vector_entry_point"] | None = Field(
        default=None,
        description="have gymnasium step them as one vector, which fails as one; absent: each by itself, the faster "
        "choice for envs in Python, unless the id has a vector of its own (vector_entry_point)",
    )
    seed: int | None = Field(
        default=None, ge=0, description="root of every random number of the fleet's runners; None takes fresh entropy"
    )
    max_env_seed: int = Field(
        default=2**63 - 1,
        ge=1,
        lt=2**63,
        description="largest seed env.reset gets; 2**32 - 1 for envs that take only 32 bits (seeds may then repeat)",
    )
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = Field(
        default="truncate_episodes", description="cut fragments after a number of steps, or deliver whole episodes only"
    )
    rollout_fragment_length: int = Field(
        default=64, ge=1, description="env steps of each env in a fragment, when episodes may be cut"
    )
    episode_lookback_horizon: int = Field(
        default=0,
        ge=0,
        description="steps before its first that a chunk carries, in columns of their own; connectors and recurrent "
        "modules need none, and with 0 a cut copies nothing",
    )
    explore: bool = Field(default=True, description="sample from the policy's distribution; False takes its mode")
    env_to_module: list[Piece] = Field(
        default=[],
        description='what observations pass on their way to the module: "package.module:factory" of a connector, or '
        "{build = ..., config = {...}}",
    )
    module_to_env: list[Piece] = Field(default=[], description="what actions pass on their way to the env, likewise")
    policies: dict[str, PolicySettings] | None = Field(
        default=None, description="several agents: module id -> {build, config} of its policy; {} is that of [module]"
    )
    policy_mapping_fn: str | dict[str, str] | None = Field(
        default=None,
        description='several agents: "package.module:function" of (agent id, episode id), or a table, to module ids',
    )
    count_steps_by: Literal["env_steps", "agent_steps"] = Field(
        default="env_steps", description="several agents: what rollout_fragment_length counts"
    )
    missing_final_observation: Literal["error", "repeat", "drop"] = Field(
        default="error",
        description="several agents: one is truncated and its last observation missing: the env has failed, or what "
        "it acted upon is repeated, or its last step is dropped; each is counted",
    )
    infos: Literal["all", "none"] = Field(default="all", description="whether non-empty infos travel with the chunks")
    callbacks: list[str] = Field(
        default=[], description='"package.module:Class" of each callback object, in the order in which they are called'
    )
    metrics_num_episodes_for_smoothing: int = Field(
        default=100, ge=1, description="newest episodes, of all runners together, behind the mean, min and max of any"
    )
    torch_threads: int = Field(default=1, ge=1, description="threads torch may use in the sampling process")
    disable_env_checking: bool = Field(
        default=False, description="skip the check of observations against their bounds; never that of shape and dtype"
    )
    restart_failed_sub_environments: bool = Field(
        default=True, description="rebuild an env that failed and go on; False raises its error"
    )
    env_placement: Literal["inline", "process"] = Field(
        default="inline",
        description="where envs live: in the runner's own process, or in others, where one may hang, crash or leak",
    )
    envs_per_process: int = Field(
        default=4, ge=1, description="envs that share a process, and its death; cheap ones share the cost of a message"
    )
    env_construct_timeout_s: float = Field(
        default=120.0, gt=0, description="how long the start of an env's process, and its construction, may each take"
    )
    env_reset_timeout_s: float = Field(
        default=60.0, gt=0, description="how long reset() may take where envs have processes, which are killed then"
    )
    env_step_timeout_s: float = Field(default=60.0, gt=0, description="how long step() may take, likewise")
    env_process_max_rss_mb: int | None = Field(
        default=None,
        ge=1,
        description="memory at which a process of envs is replaced as its episodes end, and a quarter above, killed",
    )
    env_process_max_episodes: int | None = Field(
        default=None, ge=1, description="episodes after which a process of envs is replaced as its episodes end"
    )
    env_close_timeout_s: float = Field(
        default=5.0, gt=0, description="how long an env's close() may take before it is abandoned with a warning"
    )
    env_restart_attempts: int = Field(
        default=8, ge=1, description="failures in a row, nothing delivered between them, that one env is forgiven"
    )
    env_restart_backoff_s: float = Field(
        default=0.05, ge=0, description="wait before the second rebuild in a row; doubles with each further one"
    )
    env_restart_backoff_max_s: float = Field(default=5.0, ge=0, description="longest such wait")
    max_env_restarts_per_window: int = Field(
        default=600, ge=1, description="rebuilds of one env that a window may see, delivered or not"
    )
    env_restart_window_s: float = Field(default=60.0, gt=0, description="length of that window")

    @property
    def is_multi_agent(self) -> bool:
        """Whether envs are multi-agent ones, which is what `policies` or a mapping to them say."""
        return self.policies is not None or self.policy_mapping_fn is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.policies, dict):
            check_module_ids(self.policies)
            if isinstance(self.policy_mapping_fn, dict):
                check_mapping_table(self.policy_mapping_fn, self.policies)
        if self.env_placement == "process" and (self.gym_env_vectorize_mode is not None or self.is_multi_agent):
            other = "policies" if self.gym_env_vectorize_mode is None else "gym_env_vectorize_mode"
            raise ValueError(
                f"env_placement = 'process' is for envs of one agent, each by itself, and {other} is given; leave one "
                "of them out"
            )
        if self.env_restart_backoff_s > self.env_restart_backoff_max_s:
            raise ValueError(
                f"env_restart_backoff_s = {self.env_restart_backoff_s:g} is more than "
                f"env_restart_backoff_max_s = {self.env_restart_backoff_max_s:g}; lower it or raise the other"
            )
        if self.gym_env_vectorize_mode is not None and self.is_multi_agent:
            raise ValueError(
                f"gym_env_vectorize_mode = {self.gym_env_vectorize_mode!r} is for envs of one agent, and policies for "
                "several; leave one of them out"
            )
        return self


class SamplingSection(SamplingSettings):
    """What each worker samples."""

    env: str = Field(
        default="CartPole-v1", min_length=1, description='a registered gymnasium id, or "package.module:make_env"'
    )


class ModuleSection(Section):
    """The policy module, built by the same name in workers and in the learner."""

    build: str = Field(default="headrace.workers.modules:actor_critic", description='"package.module:build"')
    config: dict[str, Any] = Field(default={}, description="keyword arguments of build")


class WorkerSection(Section):
    """How a worker talks to the broker."""

    window_batches: int | None = Field(
        default=None,
        ge=1,
        le=WINDOW - 1,
        description="batches a worker keeps until they are settled; absent: what two updates of the learner need",
    )
    window_bytes: int = Field(default=256 << 20, ge=1, description="bytes, likewise; one batch is always allowed")
    random_actions_before_weights: bool = Field(
        default=False, description="sample at random until the first weights arrive"
    )
    connect_timeout_s: float = Field(default=60.0, gt=0, description="how long to wait for a broker's first answer")
    drain_timeout_s: float = Field(default=10.0, gt=0, description="how long SIGTERM waits for batches to be accepted")


class BrokerSection(Section):
    """The broker's endpoints and limits."""

    host: str = Field(default="127.0.0.1", description="address to bind; off loopback needs [keys]")
    worker_port: int = Field(default=0, ge=0, le=65535, description="0 takes a free port")
    learner_port: int = Field(default=0, ge=0, le=65535)
    weights_port: int = Field(default=0, ge=0, le=65535)
    allow_insecure: bool = Field(
        default=False, description="serve other machines without keys, unencrypted; warned of at every start"
    )
    max_batch_bytes: int = Field(default=128 << 20, ge=1 << 16, description="largest batch accepted")
    max_held_bytes: int = Field(
        default=1 << 30, ge=1 << 20, description="bytes held until committed; workers wait beyond that"
    )
    overflow: Literal["block", "drop_oldest", "drop_stale"] = Field(
        default="block", description="what gives when it is full"
    )
    max_staleness: int = Field(
        default=8, ge=1, description="drop_stale: weights versions behind the newest that are still kept"
    )
    ack: Literal["learner", "broker"] = Field(
        default="learner", description="whose receipt lets a worker forget a batch"
    )
    lease_s: float = Field(default=10.0, gt=0, description="silence after which a worker counts as lost")
    heartbeat_interval_s: float = Field(default=1.0, gt=0)
    report_interval_s: float = Field(default=0.5, gt=0, description="how often Redis hears from the broker")

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
    """Whether a broker that binds `host` can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class LearnerSection(Section):
    """The reference PPO learner. Its defaults take CartPole-v1 to a sampled return of 475 in some 100,000 steps."""

    enabled: bool = Field(default=True, description="false: `up` starts no learner; connect your own EpisodeStream")
    steps_per_update: int = Field(default=2048, gt=0, description="agent steps gathered for one PPO update")
    epochs: int = Field(default=10, gt=0, description="passes over the steps of one update, at most")
    minibatch_size: int = Field(default=256, gt=0)
    learning_rate: float = Field(default=1e-3, gt=0)
    gamma: float = Field(default=0.98, gt=0, le=1)
    gae_lambda: float = Field(default=0.9, ge=0, le=1)
    clip: float = Field(default=0.2, gt=0)
    value_coefficient: float = Field(default=0.5, ge=0)
    entropy_coefficient: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=0.5, gt=0)
    target_kl: float = Field(
        default=0.03,
        gt=0,
        description="the epoch in which the policy has moved this far is the update's last; 1e9: never",
    )
    policies_to_train: list[str] | None = Field(
        default=None, description="module ids; absent: all. The others are frozen as they were built"
    )
    seed: int = Field(default=0, ge=0)
    torch_threads: int = Field(default=1, gt=0)


class RedisSection(Section):
    """Which Redis the fleet reports to."""

    url: str = Field(default="", description="empty: a server of our own in the run directory")


class KeysSection(Section):
    """Keys of the fleet's sockets: see `schemas/keys.py`."""

    dir: str = Field(
        default="",
        description="folder that `headrace keys init` made, or a copy of this machine's part; empty: no keys",
    )

    @field_validator("dir")
    @classmethod
    def _absolute(cls, folder: str) -> str:
        """The same folder for every process of the fleet, whatever its working directory."""
        return str(Path(folder).expanduser().absolute()) if folder else ""


class SupervisorSection(Section):
    """How `up` keeps its processes alive."""

    restart_backoff_s: float = Field(
        default=0.2, gt=0, description="pause before the first restart; doubles, with jitter"
    )
    restart_backoff_max_s: float = Field(default=10.0, gt=0)
    max_restarts_per_window: int = Field(
        default=10, ge=0, description="restarts of one process before it counts as crash-looping"
    )
    restart_window_s: float = Field(default=60.0, gt=0)
    zombie_grace_s: float = Field(
        default=30.0, gt=0, description="how long a silent, replaced worker may live on to be fenced"
    )
    stop_timeout_s: float = Field(default=20.0, gt=0, description="how long a draining process has before it is killed")


class FleetConfig(Section):
    """All sections."""

    fleet: FleetSection = FleetSection()
    sampling: SamplingSection = SamplingSection()
    module: ModuleSection = ModuleSection()
    worker: WorkerSection = WorkerSection()
    broker: BrokerSection = BrokerSection()
    learner: LearnerSection = LearnerSection()
    redis: RedisSection = RedisSection()
    keys: KeysSection = KeysSection()
    supervisor: SupervisorSection = SupervisorSection()

    @model_validator(mode="after")
    def _check(self) -> FleetConfig:
        host = self.broker.host
        if not (self.keys.dir or self.broker.allow_insecure or is_loopback(host)):
            raise ValueError(
                f"broker.host = {host!r} serves other machines: it needs keys.dir (`headrace keys init` makes keys), "
                "or 127.0.0.1, or broker.allow_insecure = true on a network you trust"
            )
        policies = sorted(self.sampling.policies or {"default_policy"})
        unknown = sorted(set(self.learner.policies_to_train or policies) - set(policies))
        if unknown:
            raise ValueError(f"learner.policies_to_train names {unknown}; the policies are {policies}")
        window, enough = self.worker.window_batches, self._batches_for(self.learner.steps_per_update)
        if self.learner.enabled and window is not None and window < enough:
            raise ValueError(
                f"worker.window_batches = {window} keeps too little for one update of learner.steps_per_update = "
                f"{self.learner.steps_per_update}: everybody would wait; {enough} batches a worker are the least"
            )
        return self

    @property
    def _modules(self) -> int:
        """Of how many modules a cut gives a batch each."""
        return len(self.sampling.policies or ("default_policy",))

    def window_batches(self) -> int:
        """Batches a worker keeps until they are settled. Few mean fresh data: a worker that may not run ahead samples
        with newer weights."""
        if self.worker.window_batches is not None:
            return self.worker.window_batches
        if not self.learner.enabled or self.sampling.batch_mode != "truncate_episodes":
            return min(DEFAULT_WINDOW * self._modules, WINDOW - 1)
        least, enough = LEAST_WINDOW * self._modules, self._batches_for(2 * self.learner.steps_per_update)
        return min(max(least, enough), WINDOW - 1)

    def _batches_for(self, steps: int) -> int:
        """Batches that each worker must have under way for `steps` of the fleet: one a module and cut.

        Agents that act together make more steps of a cut than is reckoned with here. 1 where batches vary.
        """
        if self.sampling.batch_mode != "truncate_episodes":
            return 1
        cut = self.sampling.num_envs * self.sampling.rollout_fragment_length
        return math.ceil(steps / (cut * max(1, self.fleet.workers))) * self._modules
