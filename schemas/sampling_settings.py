"""Settings of what a runner samples and how, as plain values. A fleet's file and `EnvRunnerConfig` share them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headrace.schemas.module_spaces import check_mapping_table, check_module_ids
from headrace.schemas.section import Section

LONGEST_S = 1_000_000.0
"""Longest wait in seconds, eleven days. The kernel's own calls can sleep for no more than twice that."""
Seconds = Annotated[float, Field(le=LONGEST_S)]

Piece = str | dict[str, Any]
"""How to build a connector: see `plugins.load_factory`."""


class PolicySettings(Section):
    """Settings of one of several policies. Absent ones are taken from [module] and [sampling]."""

    build: str | None = Field(default=None, description='"package.module:build"')
    config: dict[str, Any] | None = Field(default=None, description="keyword arguments of build")
    env_to_module: list[Piece] | None = Field(default=None, description="its own, in place of [sampling]'s")
    module_to_env: list[Piece] | None = Field(default=None, description="likewise")


class SamplingSettings(Section):
    """Settings of one runner as plain values: the part of EnvRunnerConfig that a file can hold."""

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
        description="largest seed env.reset gets; 2**31 - 1 for envs that take a C int (seeds may then repeat)",
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
    max_idle_env_steps: int = Field(
        default=10_000,
        ge=1,
        description="several agents: env steps in a row in which nobody acts, after which the env counts as failed",
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
    env_placement: Literal["inline", "process", "remote"] = Field(
        default="inline",
        description="where envs live: in the runner's own process; in others, where one may hang, crash or leak; or "
        "with `headrace env-host`s, on whatever machines, that come to this worker",
    )
    env_hosts_host: str = Field(
        default="127.0.0.1",
        description="remote envs: address where a worker listens for their hosts; off loopback needs [keys]",
    )
    env_hosts_port: int = Field(
        default=0, ge=0, le=65_535, description="port, likewise, plus the worker's slot; 0 takes a free one"
    )
    env_hosts_allow_insecure: bool = Field(
        default=False, description="listen for other machines without keys, unencrypted; warned of at every start"
    )
    env_hosts_lease_s: Seconds = Field(
        default=10.0, ge=1, description="silence after which an env host counts as lost, and its episodes with it"
    )
    env_hosts_timeout_s: Seconds | None = Field(
        default=None, gt=0, description="how long to wait while no env host at all is there; absent: for ever"
    )
    envs_per_process: int = Field(
        default=4, ge=1, description="envs that share a process, and its death; cheap ones share the cost of a message"
    )
    remote_env_batch_wait_ms: float | None = Field(
        default=None,
        ge=0,
        le=LONGEST_S * 1000,
        description="envs elsewhere: act for those that are ready, having waited so long for more; absent: "
        "for all at once when the last is ready, which cuts the same chunks every time; external envs act so always",
    )
    double_buffering: bool = Field(
        default=False,
        description="envs elsewhere: act for every other one while its neighbour is stepped, if the policy takes "
        "time; each half waits for its slowest",
    )
    env_construct_timeout_s: Seconds = Field(
        default=120.0,
        gt=0,
        description="how long an env's construction may take, and before it the start of its process, which has 60 s "
        "at least",
    )
    env_reset_timeout_s: Seconds = Field(
        default=60.0, gt=0, description="how long reset() may take where envs have processes, which are killed then"
    )
    env_step_timeout_s: Seconds = Field(default=60.0, gt=0, description="how long step() may take, likewise")
    env_process_max_rss_mb: int | None = Field(
        default=None,
        ge=1,
        description="memory at which a process of envs is replaced as its episodes end, and a quarter above, killed",
    )
    env_process_max_episodes: int | None = Field(
        default=None, ge=1, description="episodes after which a process of envs is replaced as its episodes end"
    )
    external_start_timeout_s: Seconds = Field(
        default=60.0, gt=0, description="external envs: how long start_episode() may wait for one of num_envs places"
    )
    external_action_timeout_s: Seconds = Field(
        default=300.0, gt=0, description="how long get_action() may wait for the sampler, likewise"
    )
    external_log_timeout_s: Seconds = Field(
        default=60.0, gt=0, description="how long log_action() may wait for the sampler, likewise"
    )
    external_fragment_max_age_s: Seconds = Field(
        default=5.0, gt=0, description="a worker ships what external envs have given after so long, if few they are"
    )
    external_silence_timeout_s: Seconds = Field(
        default=300.0, gt=0, description="how long sample() waits for external envs of which nobody says anything"
    )
    env_close_timeout_s: Seconds = Field(
        default=5.0, gt=0, description="how long an env's close() may take before it is abandoned with a warning"
    )
    env_restart_attempts: int = Field(
        default=8, ge=1, description="failures in a row, nothing delivered between them, that one env is forgiven"
    )
    env_restart_backoff_s: Seconds = Field(
        default=0.05, ge=0, description="wait before the second rebuild in a row; doubles with each further one"
    )
    env_restart_backoff_max_s: Seconds = Field(default=5.0, ge=0, description="longest such wait")
    max_env_restarts_per_window: int = Field(
        default=600, ge=1, description="rebuilds of one env that a window may see, delivered or not"
    )
    env_restart_window_s: Seconds = Field(default=60.0, gt=0, description="length of that window")

    @property
    def is_multi_agent(self) -> bool:
        """Whether envs have several agents, as `policies` or `policy_mapping_fn` say."""
        return self.policies is not None or self.policy_mapping_fn is not None

    @property
    def steps_the_ready(self) -> bool:
        """Whether envs in processes or on hosts are stepped as soon as they are ready, not all at once."""
        asked = self.double_buffering or self.remote_env_batch_wait_ms is not None
        return asked and self.env_placement != "inline"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.policies, dict):
            check_module_ids(self.policies)
            if isinstance(self.policy_mapping_fn, dict):
                check_mapping_table(self.policy_mapping_fn, self.policies)
        if self.env_placement != "inline" and self.gym_env_vectorize_mode is not None:
            raise ValueError(
                f"env_placement = {self.env_placement!r} is for envs each by itself, and gym_env_vectorize_mode is "
                "given; leave one of them out"
            )
        if self.env_placement == "inline" and self.double_buffering:
            raise ValueError(
                "double_buffering is for envs in processes or on other hosts, and env_placement is 'inline'; leave it "
                "out, or take env_placement = 'process'"
            )
        if self.double_buffering and self.remote_env_batch_wait_ms is not None:
            raise ValueError(
                f"remote_env_batch_wait_ms = {self.remote_env_batch_wait_ms:g} acts for envs that are ready, and "
                "double_buffering = true waits for one half of the envs; leave one of them out"
            )
        if self.external_fragment_max_age_s >= self.external_silence_timeout_s:
            raise ValueError(
                f"external_fragment_max_age_s = {self.external_fragment_max_age_s:g} is no less than "
                f"external_silence_timeout_s = {self.external_silence_timeout_s:g}, after which a worker "
                "whose clients only pause would end; lower it or raise the other"
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
