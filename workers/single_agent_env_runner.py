"""The single-agent runner: a vector of envs, one policy, and chunks of episodes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch
from numpy.typing import NDArray

from headrace.schemas.batch import ChunkBatch
from headrace.schemas.chunk import EpisodeChunk
from headrace.schemas.errors import ModuleError
from headrace.schemas.ledger import Discard
from headrace.schemas.spaces import Spaces
from headrace.workers.config import EnvRunnerConfig, MissingEnvError
from headrace.workers.env_runner import EnvRunner, check_size
from headrace.workers.envs.actions import RandomActions
from headrace.workers.envs.vector import EnvVector
from headrace.workers.metrics import RunnerMetrics
from headrace.workers.module_weights import read_weights, write_weights
from headrace.workers.modules.acting import Actor, Columns
from headrace.workers.modules.protocol import build_module
from headrace.workers.randomness import NoiseBlocks, SeedTree, episode_id_high
from headrace.workers.totals import RunnerTotals
from headrace.workers.vector_sampler import Mode, VectorSampler

MODULE_ID = "default_policy"


@dataclass(frozen=True, slots=True)
class _Version:
    """Which weights act."""

    learner_epoch: int = 0
    seq: int = 0
    digest: str = ""


class SingleAgentEnvRunner(EnvRunner):
    """Samples `config.num_envs` single-agent envs in this process.

    A failing env costs only its own unfinished fragment; what its siblings live through is the same to the bit as
    without the fault. `totals` is true after every poll. `incarnation` and `run_uid` make episode ids and random
    numbers unlike those of any other runner of the run; with `config.seed` and `run_uid` given, both repeat.
    """

    def __init__(
        self, config: EnvRunnerConfig, worker_index: int = 0, *, incarnation: int = 0, run_uid: str = "", **_: Any
    ) -> None:
        own = {name: copy.deepcopy(getattr(config, name)) for name in ("env_config", "module_config")}
        self.config = config.model_copy(update=own)
        self.worker_index = worker_index
        self.incarnation = incarnation
        self.totals = RunnerTotals()
        self.module: torch.nn.Module | None = None
        self._metrics = RunnerMetrics(self.totals)
        self._seeds = SeedTree(config.seed, worker_index, incarnation, config.num_envs)
        self._id_high = episode_id_high(run_uid, self._seeds.entropy, worker_index, incarnation)
        self._version = _Version()
        self._waiting: tuple[Mapping[str, NDArray[Any]], _Version] | None = None
        self._sampler: VectorSampler | None = None
        self._actor: Actor | None = None
        torch.set_num_threads(config.torch_threads)
        if config.env is not None:
            self.make_env()
            self.make_module()
        self._healthy = True

    # -- parts --------------------------------------------------------------------------------------------------------

    def make_env(self) -> None:
        """See `EnvRunner`. Raises `MissingEnvError`, `UnknownEnvError`, or `EnvError` caused by the env's own error."""
        if self._sampler is None:
            envs = EnvVector(self.config, self.worker_index, self._seeds, self.totals)
            self._sampler = VectorSampler(self.config, envs, self.totals, self._id_high)
        else:
            self._sampler.rebuild(self.config)
        self._random = RandomActions(self.spaces.action)
        self._random_noise = NoiseBlocks(self._seeds.random_actions, self._random.noise_size, "uniform")
        if self.module is not None:
            self._make_actor(self.module)

    def make_module(self) -> None:
        """See `EnvRunner`. A builder that raises NotImplementedError leaves the runner to random actions."""
        self.module = self._actor = None
        try:
            module = build_module(self.config.module, self.spaces, self.config.module_config)
        except NotImplementedError:
            return
        self.module = module.eval()
        self._version = _Version()
        self._make_actor(module)

    def _make_actor(self, module: Any) -> None:
        self._actor = Actor(module, self.spaces, self._vector.envs.observations.columns)
        self._policy_noise = NoiseBlocks(self._seeds.policy, module.noise_size, module.noise_kind)

    @property
    def _vector(self) -> VectorSampler:
        if self._sampler is None:
            raise MissingEnvError
        return self._sampler

    @property
    def env(self) -> gym.Env[Any, Any] | None:
        """Env 0 of the vector; None before `make_env`, and while it waits to be rebuilt."""
        return self._sampler.envs.lanes[0].env if self._sampler is not None else None

    @property
    def spaces(self) -> Spaces:
        """Observation and action space of each env, as data."""
        return self._vector.envs.spaces

    def call_before_rebuilds(self, on_rebuild: Callable[[], None]) -> None:
        """Have `on_rebuild` called before each rebuild of an env: whoever watches this process must be patient then."""
        self._vector.envs.on_rebuild = on_rebuild

    # -- sampling -----------------------------------------------------------------------------------------------------

    def sample(  # type: ignore[override]
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> Sequence[EpisodeChunk]:
        """Chunks of about `num_timesteps` env steps, or `num_episodes` whole episodes; finished episodes come first.

        `num_timesteps` n polls all envs ceil(n / num_envs) times and goes on with the episodes of the call before:
        without failures n to n + num_envs - 1 steps. `num_episodes` m resets all envs first and gives m to
        m + num_envs - 1 episodes; whatever was begun besides is dropped. Without a size, `config.batch_mode` decides.
        Episodes left behind, of which a part was given out before, are told by an ABORTED chunk of no steps, last.

        Raises `SampleSizeError` for a size that makes no sense, `EnvRestartBudgetError` when an env failed too often,
        and `ModuleError` when the policy fails.
        """
        check_size(num_timesteps, num_episodes)
        if num_timesteps == 0 or num_episodes == 0:
            return []
        length, width = self.config.rollout_fragment_length, self.config.num_envs
        if num_timesteps is None and num_episodes is None:
            whole = self.config.batch_mode == "complete_episodes"
            num_timesteps, num_episodes = (None, width) if whole else (length * width, None)
        mode = Mode(self.config.explore if explore is None else explore, random_actions)
        if num_episodes is None:
            polls = -(-(num_timesteps or 0) // width)
            self._begin(mode, polls, force_reset)
            for _ in range(polls):
                self._poll()
            return self._cut()
        self._begin(mode, length, force_reset=True)
        while self._vector.episodes_ended < num_episodes:
            self._poll(stop_at_episodes=num_episodes)
        self._vector.abandon(Discard.RESET)
        return self._cut()

    def sample_fragment(self, on_poll: Callable[[], None] | None = None, random_actions: bool = False) -> ChunkBatch:
        """What a worker ships: `rollout_fragment_length` polls, then everything open is cut.

        With batch_mode "complete_episodes": polls until `num_envs` episodes have finished, which are delivered; the
        others stay open. `on_poll` is called after every poll, and now and then while all envs wait to be rebuilt.
        """
        whole = self.config.batch_mode == "complete_episodes"
        length = self.config.rollout_fragment_length
        self._begin(Mode(self.config.explore, random_actions), length, force_reset=False)
        polls = 0
        while self._vector.episodes_ended < self.config.num_envs if whole else polls < length:
            self._poll(on_wait=on_poll)
            polls += 1
            if on_poll is not None:
                on_poll()
            if self._waiting is not None:  # a batch names one learner epoch
                break
        if whole and self._waiting is not None:
            self._vector.abandon(Discard.RESET)
            whole = False
        return self._cut(keep_open=whole)

    def _begin(self, mode: Mode, capacity: int, force_reset: bool) -> None:
        if not mode.random_actions and self._vector is not None and self._actor is None:
            raise ModuleError(
                "this runner has no module (its builder raised NotImplementedError); use random_actions=True"
            )
        self._vector.begin(mode, capacity, force_reset=force_reset)

    def _poll(self, on_wait: Callable[[], None] | None = None, stop_at_episodes: int | None = None) -> None:
        self._vector.poll(self._choose_actions, self._version.seq, on_wait=on_wait, stop_at_episodes=stop_at_episodes)

    def _choose_actions(self) -> Columns:
        mode = self._vector.mode
        if mode.random_actions:
            return self._random(self._random_noise.next())
        assert self._actor is not None
        return self._actor(self._policy_noise.next() if mode.explore else None)

    def _cut(self, keep_open: bool = False) -> ChunkBatch:
        version = self._version
        chunks, batch = self._vector.cut(
            version.learner_epoch, version.digest, self.worker_index, self.incarnation, keep_open=keep_open
        )
        self._metrics.add(chunks, batch)
        if self._waiting is not None:
            self._apply(*self._waiting)
        return batch

    def discard_open(self, reason: Discard) -> ChunkBatch:
        """End sampling: what finished since the last cut, and end markers for episodes of which a part was given out.

        Unfinished steps are lost under `reason`. The next sampling resets all envs.
        """
        self._vector.finish(reason)
        return self._cut()

    # -- weights and state --------------------------------------------------------------------------------------------

    def set_weights(
        self, state: Mapping[str, NDArray[Any]], seq: int, learner_epoch: int = 0, digest: str = ""
    ) -> None:
        """Act with `state` from the next poll on. Raises `ModuleError`, changing nothing, if it does not fit.

        Another learner's epoch ends the fragment that is open, whose batch names only one, and takes effect after the
        cut; `weights_version` always tells what acts.
        """
        version = _Version(learner_epoch, seq, digest)
        if learner_epoch != self._version.learner_epoch and self.totals.open:
            self._waiting = (state, version)
        else:
            self._apply(state, version)

    def _apply(self, state: Mapping[str, NDArray[Any]], version: _Version) -> None:
        self._waiting = None
        if self.module is None:
            raise ModuleError("this runner has no module to take weights")
        write_weights(self.module, state)
        self._version = version

    @property
    def weights_version(self) -> tuple[int, int]:
        """(learner_epoch, seq) of the weights in use; (0, 0) are those the module was built with."""
        return self._version.learner_epoch, self._version.seq

    def get_state(self) -> dict[str, Any]:
        """See `EnvRunner`; weights as arrays by name, absent without a module."""
        state: dict[str, Any] = {"num_env_steps_sampled_lifetime": self._metrics.steps_before + self.totals.delivered}
        if self.module is not None:
            version = self._version
            state["rl_module"] = read_weights(self.module)
            state["weights_seq_no"], state["learner_epoch"] = version.seq, version.learner_epoch
            state["weights_digest"] = version.digest
        return state

    def set_state(self, state: Mapping[str, Any], *, force: bool = False) -> None:
        """See `EnvRunner`. Weights are taken only if (learner_epoch, weights_seq_no) is newer, or with `force`."""
        if "rl_module" in state:
            epoch, seq = int(state.get("learner_epoch", 0)), int(state.get("weights_seq_no", 0))
            if force or (epoch, seq) > self.weights_version:
                self.set_weights(state["rl_module"], seq, epoch, str(state.get("weights_digest", "")))
        if "num_env_steps_sampled_lifetime" in state:
            self._metrics.steps_before = int(state["num_env_steps_sampled_lifetime"]) - self.totals.delivered

    # -- what else one may ask ----------------------------------------------------------------------------------------

    def get_metrics(self) -> dict[str, Any]:
        """See `EnvRunner`; figures that have no value are absent."""
        return self._metrics.report()

    def take_finished_episodes(self) -> list[tuple[float, int]]:
        """(return, length) of each episode delivered to its end since the last call."""
        return self._metrics.take_finished()

    def get_spaces(self) -> dict[str, tuple[gym.Space[Any], gym.Space[Any]]]:
        """See `EnvRunner`."""
        return {MODULE_ID: self._vector.envs.gym_spaces}

    def assert_healthy(self) -> None:
        """See `EnvRunner`."""
        if not getattr(self, "_healthy", False):
            raise AssertionError("the runner was not built to its end, or was stopped")

    def stop(self) -> None:
        """See `EnvRunner`."""
        self._healthy = False
        if self._sampler is not None:
            self._sampler.envs.close()
