"""What every env runner offers, whatever it steps."""

from __future__ import annotations

import copy
import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

import torch

from headrace.schemas.chunk import EpisodeChunk
from headrace.schemas.errors import CallbackError, ModuleError, RunnerStoppedError
from headrace.schemas.ledger import Discard
from headrace.schemas.spaces import Spaces
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.metrics import RunnerMetrics
from headrace.workers.mode import Mode
from headrace.workers.randomness import SeedTree, episode_id_high
from headrace.workers.runner_state import RunnerState, Version
from headrace.workers.sample_size import check_size
from headrace.workers.totals import RunnerTotals

Batch = TypeVar("Batch", bound=Sequence[EpisodeChunk])
"""What one cut gives."""


_OWN_SETTINGS = ("env_config", "module_config", "env_to_module", "module_to_env")
"""What a runner copies, so that neither it nor its caller sees what the other changes later."""


class Sampler(Protocol):
    """What the sampling loop asks of whoever steps the envs."""

    @property
    def episodes_ended(self) -> int: ...
    @property
    def hangs(self) -> bool: ...
    @property
    def resets(self) -> int: ...
    @property
    def answered(self) -> int | None: ...
    def begin(self, mode: Mode, capacity: int, *, force_reset: bool) -> None: ...
    def abandon(self, reason: Discard) -> None: ...
    def finish(self, reason: Discard) -> None: ...
    def close(self) -> None: ...


class EnvRunner(RunnerState, Generic[Batch]):
    """Steps environments with a policy and gives episode chunks. One thread at a time; usable in a `with` block.

    The sampling loop stands here, once: it polls until enough steps were taken or enough episodes have ended.
    """

    def __init__(self, config: EnvRunnerConfig, worker_index: int, incarnation: int, run_uid: str) -> None:
        own = {name: copy.deepcopy(getattr(config, name)) for name in _OWN_SETTINGS}
        self.config = config.model_copy(update=own)
        self.worker_index = worker_index
        self.incarnation = incarnation
        self.totals = RunnerTotals()
        self._metrics = RunnerMetrics(config, self.totals)
        self.callbacks = CallbackList(config.callbacks, self._callback_arguments)
        self._seeds = SeedTree(config.seed, worker_index, incarnation, config.num_envs)
        self._id_high = episode_id_high(run_uid, self._seeds.entropy, worker_index, incarnation)
        self._version = Version()
        self._waiting = None
        self._stopped = False
        """All envs are closed, for good or until a `make_env` that goes through."""
        self.steps_elsewhere: int | None = None
        """Env steps of the fleet that others than this runner made, as far as is known; None without a fleet."""
        self._sampler: Sampler | None = None
        torch.set_num_threads(config.torch_threads)

    # -- what the kinds of runner do each in its own way --------------------------------------------------------------

    @abstractmethod
    def _make_envs(self) -> None:
        """Build all envs from the config, or build them anew, and let the module, if there is one, see them."""

    @abstractmethod
    def make_module(self) -> None:
        """Build the policy anew from the config."""

    @abstractmethod
    def get_metrics(self) -> dict[str, Any]:
        """Steps and completed episodes since the last call, and lifetime sums."""

    @abstractmethod
    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """Module id -> (observation space, action space), as the env has them."""

    @property
    @abstractmethod
    def module_spaces(self) -> dict[str, Spaces]:
        """Module id -> the spaces its chunks have, as data, in one order in every process of a fleet."""

    @abstractmethod
    def call_before_rebuilds(self, on_rebuild: Callable[[], None]) -> None:
        """Have `on_rebuild` called before each rebuild of an env: whoever watches this process must be patient then."""

    @abstractmethod
    def _check_can_act(self) -> None:
        """Raise `ModuleError` if there is no policy to act with."""

    @abstractmethod
    def _poll(self, on_wait: Callable[[], None] | None, stop_at_episodes: int | None) -> None:
        """Step every env that is up, once; see `VectorSampler.poll`."""

    @abstractmethod
    def _cut(self, keep_open: bool) -> Batch:
        """Deliver what was gathered; `keep_open`: whole episodes only."""

    @abstractmethod
    def _attach_updates(self, batch: Batch) -> Batch:
        """The batch with what connectors have learnt since the last one; untaken while it has no chunks to go with."""

    @property
    @abstractmethod
    def _vector(self) -> Sampler:
        """The sampler; raises `MissingEnvError` before `make_env`."""

    @property
    def _resets_envs(self) -> bool:
        """Whether whole episodes are sampled from a reset of all envs on: not where nobody can reset them."""
        return True

    @property
    def _is_overdue(self) -> bool:
        """Whether a fragment is to be cut although it is not full."""
        return False

    @property
    def _hangs(self) -> bool:
        return self._sampler is not None and self._sampler.hangs

    def _abandon(self, reason: Discard) -> None:
        self._vector.abandon(reason)

    def make_env(self) -> None:
        """Build all envs anew from the config, closing what was there. Open episodes are over.

        Raises `MissingEnvError`, `UnknownEnvError`, or `EnvError` caused by the env's own error; without envs then.
        """
        self.callbacks.check_at_rest("make_env()")
        self._stopped = True
        self._make_envs()
        self._stopped = False

    # -- sampling -----------------------------------------------------------------------------------------------------

    def sample(
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
        without failures n to n + num_envs - 1 steps; as many in all, but not of each env, where those are stepped that
        are ready. `num_episodes` m resets all envs first and gives m to m + num_envs - 1 episodes; whatever was begun
        besides is dropped. External envs, which nobody can reset, go on instead, and what they have begun stays open.
        Without a size, `config.batch_mode` decides.
        Episodes left behind, of which a part was given out before, are told by an ABORTED chunk of no steps, last.
        While all envs are down it waits in the caller's thread, as long as their budget of failures lets them come back.

        Raises `SampleSizeError` for a size that makes no sense, `EnvRestartBudgetError` when an env failed too often,
        `ExternalSilenceError` when nobody drives external envs, `ModuleError` when the policy fails,
        `RunnerStoppedError` after `stop`, `RunnerBusyError` within most callbacks, and `CallbackError` when
        on_sample_end does; it has the `samples`.
        """
        self.callbacks.check_at_rest("sample()")
        check_size(num_timesteps, num_episodes)
        if num_timesteps == 0 or num_episodes == 0:
            return []
        length, width = self.config.rollout_fragment_length, self.config.num_envs
        if num_timesteps is None and num_episodes is None:
            whole = self.config.batch_mode == "complete_episodes"
            num_timesteps, num_episodes = (None, width) if whole else (length * width, None)
        mode = Mode(self.config.explore if explore is None else explore, random_actions)
        if num_episodes is not None:
            self._begin(mode, length, force_reset or self._resets_envs)
            self._poll_until(self._enough_episodes(num_episodes), stop_at_episodes=num_episodes)
            if self._resets_envs:
                self._vector.abandon(Discard.RESET)
            return self._end_sample(self._deliver(keep_open=not self._resets_envs))
        steps = num_timesteps or 0
        self._begin(mode, -(-steps // width), force_reset)
        self._poll_until(self._enough_steps(steps))
        return self._end_sample(self._deliver(keep_open=False))

    def sample_fragment(
        self,
        on_poll: Callable[[], None] | None = None,
        random_actions: bool = False,
        on_wait: Callable[[], None] | None = None,
    ) -> Batch:
        """What a worker ships: `rollout_fragment_length` polls, then everything open is cut.

        With batch_mode "complete_episodes": polls until `num_envs` episodes have finished, which are delivered; the
        others stay open. Of external envs, what has come within `external_fragment_max_age_s`. `on_poll` is called
        after every poll; `on_wait`, or `on_poll` without it, now and then while envs are waited for that are elsewhere
        or to be rebuilt. Either may break this off by raising; then the next call goes on, or `cut_fragment` takes what
        is there. What connectors learnt comes with the batch of their module; `take_connector_update` will not tell it
        again.
        """
        self.callbacks.check_at_rest("sample_fragment()")
        whole = self.config.batch_mode == "complete_episodes"
        length, width = self.config.rollout_fragment_length, self.config.num_envs
        self._begin(Mode(self.config.explore, random_actions), length, force_reset=False)
        enough = self._enough_episodes(width) if whole else self._enough_steps(length * width)
        # A batch names one learner epoch.
        self._poll_until(lambda: enough() or self._waiting is not None or self._is_overdue, on_poll, on_wait=on_wait)
        return self.cut_fragment()

    def cut_fragment(self) -> Batch:
        """The fragment as it stands, after a `sample_fragment` that was broken off; a step under way is not in it."""
        whole = self.config.batch_mode == "complete_episodes"
        return self._end_sample(self._attach_updates(self._deliver(keep_open=whole)))

    def _end_sample(self, samples: Batch) -> Batch:
        self.totals.timers.end_sample()
        try:
            self.callbacks.call("on_sample_end", samples=samples)
        except CallbackError as error:
            error.samples = samples
            raise
        return samples

    def _begin(self, mode: Mode, capacity: int, force_reset: bool) -> None:
        sampler = self._vector
        if self._stopped:
            raise RunnerStoppedError
        if not mode.random_actions:
            self._check_can_act()
        self.totals.timers.begin_sample()
        sampler.begin(mode, capacity, force_reset=force_reset)

    def _poll_until(
        self,
        enough: Callable[[], bool],
        on_poll: Callable[[], None] | None = None,
        stop_at_episodes: int | None = None,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        while not enough():
            self._poll(on_wait or on_poll, stop_at_episodes)
            if on_poll is not None:
                on_poll()

    def _enough_steps(self, steps: int) -> Callable[[], bool]:
        """Polls are counted, not steps that a failure takes away, so that no cut depends on a neighbour's fault.

        What a native vector needs to reset a lane is no step. Where each lane has its own time, answers are counted.

        Agent steps cannot be known from polls, so that with them it does.
        """
        if self.config.count_steps_by == "agent_steps":
            goal = self.totals.stepped + steps
            return lambda: self.totals.stepped >= goal
        sampler, width, begun = self._vector, self.config.num_envs, itertools.count()
        if sampler.answered is not None:
            last = sampler.answered + steps
            return lambda: (sampler.answered or 0) >= last
        before = sampler.resets
        return lambda: next(begun) * width - (sampler.resets - before) >= steps

    def _enough_episodes(self, episodes: int) -> Callable[[], bool]:
        sampler = self._vector
        return lambda: sampler.episodes_ended >= episodes

    def _deliver(self, keep_open: bool) -> Batch:
        """Cut, and then let the weights act that waited for it."""
        if self._waiting is not None and (keep_open or self._vector.hangs):
            self._vector.abandon(Discard.RESET)  # steps of one batch that were chosen under two epochs
            keep_open = False
        batch = self._cut(keep_open)
        if self._waiting is not None:
            try:
                self._apply(*self._waiting)
            except CallbackError as error:
                error.samples = batch
                raise
        return batch

    def discard_open(self, reason: Discard) -> Batch:
        """End sampling: what finished since the last cut, and end markers for episodes of which a part was given out.

        Unfinished steps are lost under `reason`. The next sampling resets all envs.
        """
        self.callbacks.check_at_rest("discard_open()")
        self._vector.finish(reason)
        return self._attach_updates(self._deliver(keep_open=False))

    # -- what else one may ask ----------------------------------------------------------------------------------------

    def _callback_arguments(self) -> dict[str, Any]:
        return {"env_runner": self, "metrics_logger": self._metrics.logger, "rl_module": getattr(self, "module", None)}

    @property
    def fleet_steps(self) -> int:
        """Env steps of the whole fleet, for schedules: what modules get as batch["t"]. It never goes back.

        In a fleet those of all others that the broker has accepted, and all of this runner's life, discarded ones
        too. Without a fleet it is thought that all `num_workers` runners have lived through as many as this one.
        """
        if self.steps_elsewhere is not None:
            return self.steps_elsewhere + self.totals.env_steps
        return (self._metrics.steps_before + self.totals.env_steps) * max(self.config.num_workers, 1)

    def take_finished_episodes(self) -> list[tuple[float, int]]:
        """(return, length) of each episode delivered to its end since the last call."""
        return self._metrics.take_finished()

    def assert_healthy(self) -> None:
        """Raise AssertionError unless construction went through to its end."""
        if not getattr(self, "_healthy", False) or self._stopped:
            raise AssertionError("the runner was not built to its end, or was stopped")

    def _make_parts(self) -> None:
        """Envs and module; where they cannot all be made no env stays open, nor a process of envs."""
        try:
            self.make_env()
            self.make_module()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Close all envs. May be called twice, and on a runner that has none; `make_env` builds them anew."""
        self.callbacks.check_at_rest("stop()")
        self._stopped = True
        if self._sampler is not None:
            self._sampler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def no_module_error() -> ModuleError:
    """What is raised where a policy is asked for and there is none."""
    return ModuleError("this runner has no module (its builder raised NotImplementedError); use random_actions=True")
