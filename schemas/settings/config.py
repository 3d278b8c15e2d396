"""The configuration of a fleet: sections of frozen values, each validated when built.

`config_loading.py` finds where the values come from; `deploy/fleet.toml` shows every key.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.schemas.basics.bounds import (
    BROKER_CONNECTIONS,
    HIGHEST_PORT,
    MOST_GROUPS,
    MOST_SILENCE_S,
    TRAIN,
    WINDOW,
    GroupName,
)
from headrace.schemas.credentials.key_files import group_rule, is_group
from headrace.schemas.errors import absolute
from headrace.schemas.settings.config_section import ConfigSection
from headrace.schemas.settings.redis_url import read_redis_url
from headrace.schemas.settings.sampling_settings import SamplingSettings
from headrace.schemas.settings.serving_settings import ServingSection, check_last_port
from headrace.schemas.settings.slurm_settings import SlurmSection

DRAIN_TIMEOUT_S = 10.0
"""Seconds that a worker waits after SIGTERM until its batches are accepted."""
LEAST_WINDOW = 4
DEFAULT_WINDOW = 16
"""Batches in a worker's window when the learner's need, or the length of batches, is not known."""

_DEFAULT_STALENESS = 8


class FleetSection(ConfigSection):
    """Settings of the fleet as a whole."""

    workers: int = Field(default=2, ge=0, le=1000)  # from slot 1000 on are the workers that were started alone
    """sampler processes `up` starts on this machine"""
    env_hosts: int = Field(default=0, ge=0, le=1000)
    """env hosts `up` starts on this machine too, shared out among the workers; for env_placement remote"""
    run_dir: str = ""
    """folder for fleet.json, logs, recorders, checkpoints and Redis data; empty: `up` makes runs/ENV-TIME, and other
    commands take the newest run in runs/"""
    check_env: bool = True
    """build, reset and step one env in a process of its own before anything starts; false: only look up what is
    named"""
    until_return: float | None = None
    """stop when the mean return of the last 100 episodes reaches this, and at most 5 % were aborted meanwhile"""
    until_steps: int | None = Field(default=None, gt=0)
    """stop after this many env steps, counted from the start of the run or of its resume"""
    timeout_s: float | None = Field(default=None, gt=0)
    """end after this many seconds: with exit code 17 (TIMEOUT) where a goal is not reached or no step was made"""
    fleet_id: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    """name of the fleet; empty makes one per run directory"""
    rendezvous: str = Field(default="", max_length=4096)
    """where the broker publishes its addresses, and peers on other machines find them: a file; for peers also
    http(s)://..., or dns://NAME with broker.port; empty: rendezvous.json of run_dir; with several brokers
    {broker} in it stands for the index of each"""


class SamplingSection(SamplingSettings):
    """Settings of sampling, for every worker."""

    env: str = Field(default="CartPole-v1", min_length=1)
    """a registered gymnasium id, or the "package.module:make_env" of a function"""


class ModuleSection(ConfigSection):
    """The policy module. Workers and the learner build it by the same name."""

    build: str = "headrace.workers.modules:actor_critic"
    """the "package.module:build" of what builds the module"""
    config: dict[str, Any] = Field(default={})
    """keyword arguments of build"""
    compile: bool = False
    """let torch.compile make the passes of workers, policy servers and evaluations; the first one may take a minute,
    later ones on a host are found in torch's folder"""


class WorkerSection(ConfigSection):
    """Settings of a worker's connection to the broker."""

    window_batches: int | None = Field(default=None, ge=1, le=WINDOW - 1)
    """batches a worker keeps until they are settled; absent: the window follows the learner's updates"""
    random_actions_before_weights: bool = False
    """sample at random until the first weights arrive"""
    connect_timeout_s: float = Field(default=60.0, gt=0)
    """how long a worker or learner waits for its broker, and an env host for its worker; a supervisor's own ones: for
    the broker's first answer only"""
    advertise: str = Field(default="", max_length=180, pattern=r"^[^\s/@]*$")
    """name or address by which env hosts and clients reach this worker; empty: the address that it binds for them, or
    this machine's name where that is a wildcard"""
    compression: Literal["auto", "lz4", "none"] = "auto"
    """compress batches: auto, on the way to a broker on another machine; lz4, always; none, never; it needs `pip
    install headrace[lz4]` here and at the broker, which unpacks them for a learner without it"""
    ends_with_fleet: bool = False
    """a worker or env host that `up` has not started ends, with exit code 0, once the fleet has reached its goal or is
    stopped; false: it waits for the next fleet at the same address"""


class BrokerSection(ConfigSection):
    """The broker's endpoints and limits."""

    host: str = ""
    """address to bind for TCP, which needs [keys]; empty: Unix sockets in a folder of mode 0700 in the run directory,
    for this user's processes on this machine"""
    advertise: str = Field(default="", max_length=255, pattern=r"^[^\s/@]*$")
    """name or address by which peers reach the broker; empty: host, or this machine's name where host is 0.0.0.0 or
    ::"""
    count: int = Field(default=1, ge=1, le=64)
    """brokers of the fleet, of which each is started alone and has the workers whose slot modulo count is its index;
    one learner consumes all"""
    index: int | None = Field(default=None, ge=0, le=63)
    """which broker this one is, or which one workers without a slot join; absent: by their machine"""
    port: int = Field(default=0, ge=0, le=HIGHEST_PORT - 2)
    """port for workers; the next one is for learners, and the one after that relays weights; 0 takes free ones"""
    allow_insecure: bool = False
    """serve everyone who reaches broker.host or serving.host, without keys and unencrypted; every start warns"""
    max_batch_bytes: int = Field(default=128 << 20, ge=1 << 16)
    """largest batch accepted"""
    max_held_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """bytes held until committed; beyond that, see overflow. A worker keeps a quarter of so many until they are
    settled; one batch is always allowed"""
    max_held_batches: int | None = Field(default=None, ge=1)
    """batches held until committed; beyond that, see overflow; absent: no bound"""
    overflow: Literal["block", "drop_oldest", "drop_stale"] = "block"
    """what happens beyond max_held_bytes and max_held_batches: workers wait (block), or the oldest batches that no
    learner was given are dropped; drop_stale waits too, with max_staleness = 8"""
    max_staleness: int | None = Field(default=None, ge=1)
    """the largest lag in weights versions with which a batch may go to the learner; older ones are dropped as stale, on
    arrival and in the queue; absent: no bound, or 8 with overflow drop_stale"""
    consumer_groups: dict[GroupName, Literal["wait", "drop"]] = Field(default={}, max_length=MOST_GROUPS)
    """groups besides the learner's that read all batches too, each with what happens while it is slow or away: workers
    wait for it (wait), or it loses the oldest batches (drop)"""
    lease_s: float = Field(default=10.0, gt=0, le=MOST_SILENCE_S)
    """silence after which a worker counts as lost; peers say a heartbeat each second, or each tenth of a lease below
    10 s; a worker of a broker with more than 200 says fewer, one in 4 s for 1,000"""
    report_interval_s: float = Field(default=0.5, gt=0)
    """time between reports of the broker to Redis"""

    @model_validator(mode="after")
    def _check(self) -> BrokerSection:
        if self.index is not None and self.index >= self.count:
            raise ValueError(f"index = {self.index} is none of count = {self.count} brokers, which begin at 0")
        if TRAIN in self.consumer_groups:
            raise ValueError(f"consumer_groups names {TRAIN!r}, the learner's group, for which workers always wait")
        if self.max_batch_bytes > self.max_held_bytes:
            raise ValueError(f"max_batch_bytes = {self.max_batch_bytes} exceeds max_held_bytes = {self.max_held_bytes}")
        return self

    @property
    def ports(self) -> dict[str, int]:
        """Return the configured port of each role; 0 where the broker takes a free one."""
        return {role: self.port and self.port + place for place, role in enumerate(("worker", "learner", "weights"))}

    @property
    def zombie_grace_s(self) -> float:
        """Return how long a silent worker that was replaced may live on, to find itself fenced."""
        return 3 * self.lease_s

    def staleness_bound(self) -> int | None:
        """Return how many versions behind the newest a batch may be; None for any number."""
        is_default = self.max_staleness is None and self.overflow == "drop_stale"
        return _DEFAULT_STALENESS if is_default else self.max_staleness


def is_loopback(host: str) -> bool:
    """Return whether a server that binds `host` can be reached from this machine only. "": it has Unix sockets."""
    try:
        return host in ("", "localhost") or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_on_any_machine(host: str) -> str:
    """Return what a worker on any machine binds where one binds `host` here: loopback or all addresses; "" for ""."""
    return host and "127.0.0.1" if is_loopback(host) else "::" if ":" in host else "0.0.0.0"


class LearnerSection(ConfigSection):
    """Settings of the reference learner.

    The defaults take CartPole-v1 to a sampled return of 475 in some 100,000 steps.
    """

    enabled: bool = True
    """false: `up` starts no learner; connect your own EpisodeStream"""
    steps_per_update: int = Field(default=2048, gt=0)
    """agent steps gathered for one update"""
    epochs: int = Field(default=10, gt=0)
    """passes over the steps of one update, at most"""
    minibatch_size: int = Field(default=256, gt=0)
    """steps of one gradient step"""
    learning_rate: float = Field(default=1e-3, gt=0)
    """learning rate of Adam"""
    gamma: float = Field(default=0.98, gt=0, le=1)
    """discount of rewards, for each step"""
    gae_lambda: float = Field(default=0.9, ge=0, le=1)
    """lambda of generalised advantage estimation"""
    clip: float = Field(default=0.2, gt=0)
    """bound of PPO's ratio: it is clipped to 1 - clip and 1 + clip"""
    value_coefficient: float = Field(default=0.5, ge=0)
    """weight of the value loss"""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """weight of the entropy bonus"""
    max_grad_norm: float = Field(default=0.5, gt=0)
    """norm to which the gradient is clipped"""
    target_kl: float = Field(default=0.03, gt=0)
    """divergence at which an update stops after its current epoch; 1e9: never"""
    policies_to_train: list[str] | None = None
    """module ids to train; absent: all. The others stay frozen as they were built; with `enabled = false`, their steps
    stay with the workers"""
    evaluate_every_steps: int = Field(default=0, ge=0)
    """agent steps trained on between two evaluations of the newest checkpoint, by a process of its own that `up`
    starts; 0: none"""
    seed: int = Field(default=0, ge=0)
    """root of the learner's random numbers"""
    torch_threads: int = Field(default=1, gt=0)
    """threads that torch may use in the learner"""


REDIS_BYTES_PER_HOUR = 2 << 30


class RedisSection(ConfigSection):
    """The Redis that the fleet reports to."""

    url: str = ""
    """address, redis://[user:password@]host:port/db, or rediss:// for TLS; or the path of a file of mode 0600 that has
    it; empty: the fleet starts its own in the run directory"""
    bytes_per_hour: int = Field(default=REDIS_BYTES_PER_HOUR, ge=0, le=1 << 48)
    """bytes that copies of checkpoints and weights may write to Redis in an hour, half each; large ones are written
    less often; 0: Redis has no copies, and a start takes none from it"""

    @field_validator("url")
    @classmethod
    def _read_file(cls, url: str) -> str:
        return read_redis_url(url)


class KeysSection(ConfigSection):
    """Keys of the fleet's sockets; `schemas/credentials/keys.py` describes the files."""

    dir: str = ""
    """folder that `headrace keys init` made, or a copy of this machine's part; empty: no keys"""
    group: str = ""
    """group of this machine's keys; empty: that of the only key of its role in the folder, or among several the default
    group"""

    @field_validator("group")
    @classmethod
    def _named(cls, group: str) -> str:
        if not is_group(group):
            raise ValueError(f"{group!r} is no name of a group; {group_rule()}")
        return group

    @field_validator("dir")
    @classmethod
    def _absolute(cls, folder: str) -> str:
        """Make the folder absolute, so that it is the same for every process of the fleet."""
        return str(absolute(Path(folder).expanduser())) if folder else ""


MOST_WORKERS_ON_RAY = 10_000


class RaySection(ConfigSection):
    """Workers that `up` keeps on a Ray cluster (extra ray)."""

    address: str = Field(default="auto", min_length=1)
    """the cluster: HOST:PORT of its head, or auto: that of RAY_ADDRESS, else the one on this machine"""
    workers: int = Field(default=0, ge=0, le=MOST_WORKERS_ON_RAY)
    """workers that `up` keeps there, each in an actor of its own"""


class SupervisorSection(ConfigSection):
    """Settings of the supervisor, by which `up` keeps its processes alive."""

    restart_attempts: int = Field(default=10, ge=0)
    """restarts of one process, within 60 s of its running, before it counts as crash-looping; of a worker, also
    restarts in a row at any pace before a step of it was committed"""
    hung_after_s: float = Field(default=300.0, gt=0)
    """how long the learner may take for one minibatch before it counts as hung and is replaced"""
    stop_timeout_s: float = Field(default=20.0, gt=0)
    """how long a draining process has before it is killed, and a learner from elsewhere for its last update"""


class LoggingSection(ConfigSection):
    """Settings of what `up` logs of a run. It always writes `metrics.jsonl` in the run directory."""

    interval_s: float = Field(default=5.0, gt=0)
    """time between two rows about the whole fleet"""
    loggers: list[str] = Field(default=[])
    """further loggers: tensorboard, wandb or mlflow, each with the extra of its name, and loggers of your own, as
    "package.module:Class", which is called with a RunInfo"""


class DashboardSection(ConfigSection):
    """Settings of the live page that `up` serves to browsers on this machine."""

    enabled: bool = True
    """`up` serves the page and prints its address"""
    port: int = Field(default=0, ge=0, le=HIGHEST_PORT)
    """of the page, on 127.0.0.1; 0: a free one, which `up` names at its start and in fleet.json"""


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
    ray: RaySection = RaySection()
    supervisor: SupervisorSection = SupervisorSection()
    serving: ServingSection = ServingSection()
    logging: LoggingSection = LoggingSection()
    dashboard: DashboardSection = DashboardSection()
    slurm: SlurmSection = SlurmSection()

    @model_validator(mode="after")
    def _check(self) -> FleetConfig:
        self._check_hosts()
        if self.sampling.synchronous and self.broker.count > 1:
            raise ValueError(
                f"sampling.synchronous = true has one broker, and broker.count = {self.broker.count}; leave one of "
                "them out"
            )
        self._check_env_hosts()
        self.serving.check_slots(self.fleet.workers)
        policies = sorted(self.sampling.policies or {"default_policy"})
        unknown = sorted(set(self.learner.policies_to_train or policies) - set(policies))
        if unknown:
            raise ValueError(f"learner.policies_to_train names {unknown}; the policies are {policies}")
        if self.learner.policies_to_train == [] and not self.learner.enabled:
            raise ValueError(
                "learner.policies_to_train = [] leaves your learner no step; name a policy, or leave it out"
            )
        self._check_evaluation()
        if self.sampling.synchronous and self.worker.random_actions_before_weights:
            raise ValueError(
                "sampling.synchronous = true has all steps sampled with the newest weights, and "
                "worker.random_actions_before_weights = true samples before there are any; leave one of them out"
            )
        table = self.sampling.policy_mapping_fn
        if self.sampling.synchronous and isinstance(table, dict) and table and {*table.values()} <= self.frozen_modules:
            raise ValueError(
                "sampling.policy_mapping_fn maps no agent to a module of learner.policies_to_train = "
                f"{self.learner.policies_to_train}, so no round of sampling.synchronous = true would end; map one, or "
                "leave synchronous out"
            )
        window, enough = self.window_batches(), self._batches_for(self.learner.steps_per_update)
        if self.keeps_too_little(window) and (self.worker.window_batches or self.sampling.policies is None):
            cut = f"sampling.num_envs = {self.sampling.num_envs} or sampling.rollout_fragment_length = "
            alone = " from one worker (with fleet.workers = 0 it may be the only one)"
            remedy = (
                f"give {enough} or more, or leave it out"
                if enough < WINDOW
                else f"raise {cut}{self.sampling.rollout_fragment_length}: no window keeps the {enough} that it takes"
            )
            raise ValueError(
                f"worker.window_batches = {window} keeps too little for one update of learner.steps_per_update = "
                f"{self.learner.steps_per_update}{'' if self.fleet.workers + self.ray.workers else alone}: workers and "
                f"learner would wait for each other; {remedy}"
            )
        if self._workers > (most := BROKER_CONNECTIONS * self.broker.count):
            raise ValueError(
                f"fleet.workers = {self.fleet.workers} and ray.workers = {self.ray.workers} are more than the {most} "
                f"connections of broker.count = {self.broker.count}: the others could not join"
            )
        held = self.broker.max_held_batches
        if held is not None and self.holds_too_little(held):
            raise ValueError(
                f"broker.max_held_batches = {held}, shared by {self._workers} workers, holds too little for one update "
                f"of learner.steps_per_update = {self.learner.steps_per_update}, which is {self._update_batches} "
                "batches of the fleet: workers and learner would wait for each other; give "
                f"{self._update_batches + self._workers - 1} or more"
            )
        return self

    @property
    def window_bytes(self) -> int:
        """Return the bytes that a worker keeps until they are settled; one batch is always allowed."""
        return self.broker.max_held_bytes // 4

    def keeps_too_little(self, window_batches: int) -> bool:
        """Return whether windows of so many batches leave the learner without a whole update."""
        return self.learner.enabled and window_batches < self._batches_for(self.learner.steps_per_update)

    def holds_too_little(self, most_batches: int) -> bool:
        """Return whether a broker that holds at most so many batches may leave its learner without a whole update.

        A worker gets credit while the room that is left is a batch for each worker, and always for one batch. False
        where batches vary, as those of several agents do, where the broker drops batches for newer ones, and for
        several brokers.
        """
        waits = self.learner.enabled and self.broker.overflow != "drop_oldest" and self.broker.count == 1
        varies = self.sampling.policies is not None or self.sampling.batch_mode != "truncate_episodes"
        batches = max(self._workers, most_batches - self._workers + 1)
        return waits and not varies and batches < self._update_batches

    @property
    def _workers(self) -> int:
        return max(1, self.fleet.workers + self.ray.workers)

    @property
    def _update_batches(self) -> int:
        """Return the batches of the whole fleet that make one update of one agent's steps."""
        return math.ceil(self.learner.steps_per_update / self.cut_steps)

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

    def _check_hosts(self) -> None:
        broker, by_name = self.broker, self.fleet.rendezvous.startswith("dns://")
        hosts = {"broker.host": broker.host, "serving.host": self.serving.host if self.serving.enabled else ""}
        given = [key for key, host in hosts.items() if host]
        if given and not self.keys.dir and not broker.allow_insecure:
            raise ValueError(
                f"{given[0]} = {hosts[given[0]]!r} serves by TCP: it needs keys.dir (`headrace keys init` makes keys); "
                "leave it out to serve this user's processes on this machine by Unix sockets, or set "
                "broker.allow_insecure = true on a network you trust"
            )
        if broker.allow_insecure and not (broker.host or self.serving.host):  # `headrace serve` enables none
            raise ValueError(
                "broker.allow_insecure = true lets everyone in, and Unix sockets serve this user alone; give "
                "broker.host or serving.host, or leave it out"
            )
        of_tcp = ("broker.port", "broker.advertise", "sampling.env_hosts_port")
        for key in of_tcp if not (broker.host or by_name) else ():
            if self.value_of(key):
                raise ValueError(
                    f"{key} = {self.value_of(key)!r} is for TCP, and broker.host is empty, which means Unix sockets; "
                    f"give broker.host and keys.dir, or leave {key} out"
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
        if placement == "remote":
            check_last_port("sampling.env_hosts_port", self.sampling.env_hosts_port, workers)

    @property
    def env_hosts_host(self) -> str:
        """Return the address where a worker listens for env hosts: as the broker does, on loopback or on all.

        "": on a Unix socket.
        """
        return host_on_any_machine(self.broker.host)

    @property
    def _modules(self) -> int:
        """Return the number of modules that workers send steps of; a cut gives one batch for each."""
        return len(self.sampling.policies or ("default_policy",)) - len(self.frozen_modules)

    @property
    def frozen_modules(self) -> frozenset[str]:
        """Return the modules whose steps stay with the workers: a learner of one's own does not train them."""
        trained = None if self.learner.enabled else self.learner.policies_to_train
        return frozenset() if trained is None else frozenset(self.sampling.policies or ()).difference(trained)

    def replaced(self, values: Mapping[str, Any]) -> FleetConfig:
        """Return a copy with other values of some settings, by dotted key. They are not checked again."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        changed = {section: getattr(self, section).model_copy(update=own) for section, own in sections.items()}
        return self.model_copy(update=changed)

    def value_of(self, key: str) -> Any:
        """Return the value of a setting by its dotted key; of `worker.window_batches`, the number in force."""
        section, _, name = key.partition(".")
        return self.window_batches() if key == "worker.window_batches" else getattr(getattr(self, section), name)

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
        return self.window_batches() // self._modules * self.cut_steps

    def window_env_steps(self) -> int | None:
        """Return the most env steps that a worker may have under way; None where batches vary.

        It is one cut more than the window has: batches that are smaller leave room for it.
        """
        if self.sampling.batch_mode != "truncate_episodes":
            return None
        return (self.window_batches() // self._modules + 1) * self.cut_steps

    @property
    def cut_steps(self) -> int:
        """Return the env steps of a cut while all envs are up."""
        return self.sampling.num_envs * self.sampling.rollout_fragment_length

    def _batches_for(self, steps: int) -> int:
        """Return how many batches each worker must have under way for `steps` of the fleet.

        A cut gives one batch for each module.

        Agents that act together make more steps of a cut than this counts. 1 where batches vary.
        """
        if self.sampling.batch_mode != "truncate_episodes":
            return 1
        return math.ceil(steps / (self.cut_steps * self._workers)) * self._modules
