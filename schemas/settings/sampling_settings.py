"""Settings of sampling as plain values, shared by a fleet's file and `EnvRunnerConfig`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from headrace.schemas.accounts.user_calls import UserCall
from headrace.schemas.basics.bounds import HIGHEST_PORT
from headrace.schemas.chunks.module_spaces import check_mapping_table, check_module_ids
from headrace.schemas.settings.config_section import ConfigSection

LONGEST_S = 1_000_000.0
"""Limit in seconds of any wait, eleven days. The kernel's own calls can sleep for no more than twice that."""
ENV_CLOSE_TIMEOUT_S = 5.0
"""Seconds that an env's close() may take before it is abandoned with a warning."""
EXTERNAL_PATIENCE_S = 300.0
"""Seconds that a call about an external episode waits for the sampler, and the sampler for such a call."""
Seconds = Annotated[float, Field(le=LONGEST_S)]

Piece = str | dict[str, Any]
"""The description of a connector: see `plugins.load_factory`."""


class PolicySettings(ConfigSection):
    """One of several policies; absent values are those of [module]."""

    build: str | None = None
    """the "package.module:build" of what builds its module"""
    config: dict[str, Any] | None = None
    """keyword arguments of build"""
    env_to_module: list[Piece] | None = None
    """its own connectors, in place of those of [sampling]"""
    module_to_env: list[Piece] | None = None
    """its own connectors for actions, in place of those of [sampling]"""


class SamplingSettings(ConfigSection):
    """Settings of one runner's sampling, as plain values: the part of EnvRunnerConfig that a file can hold."""

    env_config: dict[str, Any] = Field(default={})
    """keyword arguments of a gymnasium id; the EnvContext of a callable"""
    num_envs: int = Field(default=8, ge=1, le=65_536)
    """environments stepped together by one runner"""
    gym_env_vectorize_mode: Literal["sync", "async", "vector_entry_point"] | None = None
    """have gymnasium step them as one vector, which fails as one; absent: each by itself, the faster choice for envs in
    Python, unless the id has a vector of its own (vector_entry_point)"""
    seed: int | None = Field(default=None, ge=0)
    """root of every random number of the fleet's runners; None takes fresh entropy"""
    max_env_seed: int = Field(default=2**63 - 1, ge=1, lt=2**63)
    """largest seed env.reset gets; 2**31 - 1 for envs that take a C int (seeds may then repeat)"""
    seed_every_episode: bool = True
    """give every reset of an env a seed of its own; false: only its first one, for envs whose reset(seed=...) is slow,
    as that of Atari games; chunks of later episodes have no seed"""
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    """cut fragments after a number of steps, or deliver whole episodes only"""
    rollout_fragment_length: int = Field(default=64, ge=1)
    """env steps of each env in a fragment, when episodes may be cut"""
    episode_lookback_horizon: int = Field(default=0, ge=0)
    """steps before its first that a chunk carries, in arrays of their own; connectors and recurrent modules need none,
    and with 0 a cut copies nothing"""
    synchronous: bool = False
    """in a fleet: workers ship their share of an update with one version of the weights, and wait for the next one;
    slower, but no step is older than the weights, and a fleet repeats itself to the bit"""
    explore: bool = True
    """sample from the policy's distribution; False takes its mode"""
    env_to_module: list[Piece] = Field(default=[])
    """connectors that observations pass on their way to the module: "package.module:factory", or {build = ..., config =
    {...}}"""
    module_to_env: list[Piece] = Field(default=[])
    """connectors that actions pass on their way to the env, named as in env_to_module"""
    policies: dict[str, PolicySettings] | None = None
    """several agents: module id -> {build, config} of its policy; {} is that of [module]"""
    policy_mapping_fn: str | dict[str, str] | None = None
    """several agents: "package.module:function" of (agent id, episode id), or a table, to module ids"""
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"
    """several agents: what rollout_fragment_length counts"""
    missing_final_observation: Literal["error", "repeat", "drop"] = "error"
    """several agents: what to do when an agent is truncated without its last observation: fail the env, repeat the
    observation it acted upon, or drop its last step; each is counted"""
    infos: Literal["all", "none"] = "all"
    """whether non-empty infos travel with the chunks"""
    callbacks: list[str] = Field(default=[])
    """each callback object's "package.module:Class", in the order in which they are called"""
    metrics_num_episodes_for_smoothing: int = Field(default=100, ge=1)
    """how many of the newest episodes, of all runners together, go into means, minima and maxima"""
    torch_threads: int = Field(default=1, ge=1)
    """threads torch may use in the sampling process"""
    device: str = "cpu"
    """where policies act: "cpu", "cuda", "cuda:1", or "auto": CUDA where there is any"""
    strict_bounds: bool = False
    """fail an env whose observation leaves its Box; else the observation is delivered as told, counted, and named in
    the log"""
    restart_failed_sub_environments: bool = True
    """rebuild an env that failed and go on; False raises its error"""
    env_placement: Literal["inline", "process", "remote"] = "inline"
    """where envs live: in the runner's own process; in others, where one may hang, crash or leak; or with `headrace
    env-host`s on any machines, which connect to this worker"""
    env_hosts_port: int = Field(default=0, ge=0, le=HIGHEST_PORT)
    """remote envs: port for their hosts by TCP, to which the worker's slot is added; 0 takes a free one. A worker
    listens on loopback where broker.host is, else on all addresses; where broker.host is empty, on a Unix socket"""
    envs_per_process: int = Field(default=4, ge=1)
    """envs that share a process, and its death; cheap ones share the cost of a message"""
    remote_env_batch_wait_ms: float | None = Field(default=None, ge=0, le=LONGEST_S * 1000)
    """envs elsewhere: act for those that are ready, after waiting so long for more; absent: act for all at once when
    the last is ready, which cuts the same chunks every time. External envs always act when ready"""
    double_buffering: bool = False
    """envs elsewhere: act for one half while the other half is stepped; each half waits for its slowest"""
    env_reset_timeout_s: Seconds = Field(default=60.0, gt=0)
    """how long reset() may take where envs have processes; then the process is killed. A construction may take twice as
    long, and before it the start of the process, which has at least 60 s"""
    env_step_timeout_s: Seconds = Field(default=60.0, gt=0)
    """how long step() may take where envs have processes; then the process is killed"""
    env_process_max_rss_mb: int | None = Field(default=None, ge=1)
    """memory at which a process of envs is replaced as its episodes end; a quarter above it is killed"""
    env_process_max_episodes: int | None = Field(default=None, ge=1)
    """episodes after which a process of envs is replaced as its episodes end"""
    external_fragment_max_age_s: float = Field(default=5.0, gt=0, lt=EXTERNAL_PATIENCE_S)
    """external envs: time after which a worker ships what it has, however little"""
    env_restart_attempts: int = Field(default=8, ge=1)
    """failures of one env in a row, without a delivery between them, that are tolerated; and 75 times as many
    in 60 s"""

    @property
    def is_multi_agent(self) -> bool:
        """Return whether envs are multi-agent ones: `policies` or a mapping to them is given."""
        return self.policies is not None or self.policy_mapping_fn is not None

    @property
    def construct_timeout_s(self) -> float:
        """Return the seconds that an env's construction may take."""
        return 2 * self.env_reset_timeout_s

    def call_limits(self) -> dict[UserCall, float]:
        """Return the seconds that each kind of call of an env may take."""
        step_s = self.env_step_timeout_s
        return {
            UserCall.CONSTRUCTION: self.construct_timeout_s,
            UserCall.RESET: self.env_reset_timeout_s,
            UserCall.STEP: step_s,
            UserCall.RENDER: step_s,
        }

    @property
    def steps_the_ready(self) -> bool:
        """Return whether envs outside this process are stepped in parts, as they get ready, and not all together."""
        asked = self.double_buffering or self.remote_env_batch_wait_ms is not None
        return asked and self.env_placement != "inline"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.policies, dict):
            check_module_ids(self.policies)
            if isinstance(self.policy_mapping_fn, dict):
                check_mapping_table(self.policy_mapping_fn, self.policies)
        if not re.fullmatch(r"cpu|auto|cuda(:[0-9]{1,3})?", self.device):
            raise ValueError(
                f"device = {self.device!r:.80} is none of 'cpu', 'auto', 'cuda', and 'cuda:N', as 'cuda:1'"
            )
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
                f"remote_env_batch_wait_ms = {self.remote_env_batch_wait_ms:g} acts for each env that is ready, and "
                "double_buffering = true waits for one half of the envs; leave one of them out"
            )
        if self.gym_env_vectorize_mode is not None and self.is_multi_agent:
            raise ValueError(
                f"gym_env_vectorize_mode = {self.gym_env_vectorize_mode!r} is for envs of one agent, and policies for "
                "several; leave one of them out"
            )
        return self
