"""The sampling loop, whatever is sampled: it polls until enough steps were taken or enough episodes have ended."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from headrace.schemas.chunk import EpisodeChunk
from headrace.schemas.errors import CallbackError, RunnerStoppedError
from headrace.schemas.ledger import Discard
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.runner.runner_state import RunnerState
from headrace.workers.sampling.mode import Mode
from headrace.workers.sampling.sample_size import check_size

Batch = TypeVar("Batch", bound=Sequence[EpisodeChunk])
"""What one cut gives."""


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
    @property
    def resets_envs(self) -> bool:
        """Whether whole episodes are sampled from a reset of all envs on: not where nobody can reset them."""

    @property
    def is_overdue(self) -> bool:
        """Whether a fragment is to be cut although it is not full."""

    def begin(self, mode: Mode, capacity: int, *, force_reset: bool) -> None: ...
    def abandon(self, reason: Discard) -> None: ...
    def finish(self, reason: Discard) -> None: ...
    def close(self) -> None: ...


class SamplingLoop(RunnerState, Generic[Batch]):
    """The part of a runner that samples. It knows neither envs nor modules, only their sampler."""

    config: EnvRunnerConfig
    _stopped: bool
    """All envs are closed, for good or until a `make_env` that goes through."""

    # -- what the kinds of runner do each in its own way --------------------------------------------------------------

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
        While all envs are down it waits, in the caller's thread, for as long as their budget of failures lasts.

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
            sampler = self._vector
            self._begin(mode, length, force_reset or sampler.resets_envs)
            self._poll_until(self._enough_episodes(num_episodes), stop_at_episodes=num_episodes)
            if sampler.resets_envs:
                sampler.abandon(Discard.RESET)
            return self._end_sample(self._deliver(keep_open=not sampler.resets_envs))
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
        sampler = self._vector
        # A batch names one learner epoch.
        self._poll_until(lambda: enough() or self._waiting is not None or sampler.is_overdue, on_poll, on_wait=on_wait)
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
