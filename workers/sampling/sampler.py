"""The sampler: begins, steps, ends, aborts and cuts the episodes of a vector."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.errors import HeadraceError
from headrace.workers.callbacks import CallbackList
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import Episode, Lane
from headrace.workers.metrics.timers import OTHER, WAIT
from headrace.workers.metrics.totals import RunnerTotals
from headrace.workers.policy.acting_device import ActingDevice
from headrace.workers.policy.policies import PolicyMappingError
from headrace.workers.sampling.cutting import Stamp
from headrace.workers.sampling.episode_events import EpisodeEvents
from headrace.workers.sampling.episode_view import AnyEpisodeView
from headrace.workers.sampling.external_wait import ExternalWait
from headrace.workers.sampling.sampled_steps import ActionMode, AnyOutcome, Cut_co, SampledSteps


class Sampler(Generic[AnyOutcome, Cut_co]):
    """Samples a vector poll by poll, of one agent or several, at the pace of its envs.

        begin ── poll, poll, poll ... ── cut        an episode: begin, step, end
                      │                                         └─ abort (its env or a callback failed), rebuild
                      └─ spoilt: all open steps are lost        └─ abandon (a reset, another mode, the end)

    With `external_wait`, episodes drive themselves. A poll first takes the observations that have arrived and then
    answers them, so that callers do not wait for work between two polls.
    """

    def __init__(
        self,
        steps: SampledSteps[AnyOutcome, Cut_co],
        totals: RunnerTotals,
        callbacks: CallbackList,
        external_wait: ExternalWait | None = None,
    ) -> None:
        self.envs = envs = steps.envs
        self.steps = steps
        self.needs_reset = True
        self.needs_rebuild = False
        """True once a signal's handler has raised while envs in processes were called: their answers may be lost."""
        self._is_taking = False
        """True while a poll's outcome is taken: some lanes may have steps that are recorded nowhere yet."""
        if external_wait is not None:
            totals.timers.budget.env_part = OTHER
        self._external_wait = external_wait
        self._totals = totals
        self._events = EpisodeEvents(callbacks, steps.look)
        envs.on_episode_created = self._events.created if self._events.watches_created else None
        envs.on_failure = self._events.failed if self._events.watches_failures else None

    @property
    def resets_envs(self) -> bool:
        """Return whether sampling of whole episodes begins with a reset of all envs. External envs cannot be reset."""
        return self._external_wait is None

    @property
    def is_overdue(self) -> bool:
        """Return whether to cut a fragment that is not full, because external steps are late."""
        return self._external_wait is not None and self._external_wait.is_overdue

    def use(
        self, modules: Mapping[str, Any], count_steps: Callable[[], int], device: ActingDevice | None = None
    ) -> None:
        """Act with `modules`; see `ActingModule.use`.

        If a module remembers, open steps are lost, because its memory starts empty.
        """
        policies = self.steps.policies
        remembers = any(policy.remembers for policy in policies.values())
        for module_id, module in modules.items():
            policies[module_id].use(module, count_steps, device)
        remembers = remembers or any(policy.remembers for policy in policies.values())
        if remembers and self.steps.is_open:
            self._drop_steps()

    def begin(
        self, mode: ActionMode, capacity: int, *, force_reset: bool, on_wait: Callable[[], None] | None = None
    ) -> None:
        """Open fragments for `mode`, and start an episode in every env that has none. Raises `PolicyMappingError`.

        `on_wait` is that of `poll`. If it raises, the next `begin` resets all envs again.
        """
        self.envs.on_wait = on_wait
        if mode != self.steps.mode and self.steps.is_open:
            self._drop_steps()  # all steps of a batch have one mode
        self.steps.resume(mode, capacity)
        if force_reset or self.needs_reset:
            self.abandon(Discard.RESET)
            self.needs_reset = False
            try:
                self._totals.timers.budget.of_envs(lambda: self.envs.try_reset(range(len(self.envs.lanes))))
                self._start_episodes(self.envs.try_restart)
                self._totals.calls.raise_kept()
            except BaseException as error:
                self.needs_reset = True
                self._clear_up(error)
                raise
        if self._external_wait is not None:
            self._external_wait.begin()

    # -- one poll -----------------------------------------------------------------------------------------------------

    def poll(
        self, weights_seq: int, *, on_wait: Callable[[], None] | None = None, stop_at_episodes: int | None = None
    ) -> None:
        """Step the envs that can act, record the results, and start the next episode where one ended.

        After `stop_at_episodes` ended episodes it starts no more. May sleep while no env is up. Raises the errors of
        `EnvDriver.try_restart` and `ExternalWait.check`, `ModuleError`, `ConnectorError` and `PolicyMappingError`.
        After an error the counts are correct, and the caller may poll again.
        """
        timers = self._totals.timers
        self.steps.timers = None
        if timers.is_due():
            self.steps.timers = timers
            timers.begin_poll()
            before = self._connectors_s()
        try:
            self.envs.on_wait = on_wait
            if self._external_wait is not None:
                self._external_wait.check()
                self._take(stop_at_episodes)
            if self.envs.repairing or self.steps.is_masked:
                self._prepare(on_wait)
            self.steps.act(weights_seq)
            if self._external_wait is None:
                self._take(stop_at_episodes)
        except BaseException as error:
            self._clear_up(error)
            raise
        if self.steps.timers is not None:
            inward, outward = self._connectors_s()
            timers.end_poll(inward - before[0], outward - before[1], inline=self.envs.replies_at_once)
        if self._totals.calls.on_wait is not None:
            self._totals.calls.raise_kept()

    def _connectors_s(self) -> tuple[float, float]:
        """Return the seconds that all modules' connectors have taken: env_to_module, and module_to_env."""
        connectors = [policy.connectors for policy in self.steps.policies.values()]
        return sum(own.inward_s for own in connectors), sum(own.outward_s for own in connectors)

    def _clear_up(self, error: BaseException) -> None:
        """Discard the open steps that `error` spoilt, because only some lanes were stepped before it.

        A signal's handler may raise anywhere, as Ctrl-C does in a notebook.
        """
        taking, self._is_taking = self._is_taking, False
        cut_off = not isinstance(error, Exception) or (taking and not isinstance(error, HeadraceError))
        if isinstance(error, PolicyMappingError):
            self.abandon(Discard.RESET)
        elif self.steps.is_spoilt_by(error) or cut_off:
            self._drop_steps()
        self.needs_rebuild = self.needs_rebuild or (cut_off and self.envs.has_processes)

    def _prepare(self, on_wait: Callable[[], None] | None) -> None:
        """Rebuild the failed envs that are due, and fail those that cannot act, until there are none."""
        while True:
            if self.envs.repairing:
                self._repair(on_wait)
            failures = self.steps.unable()
            if not failures:
                return
            for failure in failures:
                self._abort(failure, recorded=True)

    def _repair(self, on_wait: Callable[[], None] | None) -> None:
        """Rebuild the failed envs that are due. Waits while no env is up."""
        budget, hosts = self._totals.timers.budget, self.envs.env_hosts
        with budget.spent_on(WAIT if hosts is not None and not hosts.connected else budget.env_part):
            self.envs.wait_for_one(self._start_episodes, on_wait)

    def _take(self, stop_at_episodes: int | None) -> None:
        steps, events = self.steps, self._events
        self._is_taking = True
        outcome = steps.take()
        if outcome is None:
            self._is_taking = False
            return
        steps.count(outcome)
        for failure in outcome.failures:
            self._abort(failure)
        steps.record(outcome)
        over = steps.over(outcome)
        if events.watches_steps or (over and events.watches_ends):
            self._tell_steps(outcome)
            over = steps.over(outcome)
        steps.end(outcome)
        if over:
            self._end_episodes(over, stop_at_episodes)
        self._is_taking = False
        if over or outcome.failures or outcome.begun:
            self._start_episodes(self._try_restart)

    def _try_restart(self) -> None:
        if self.envs.repairing:
            self._totals.timers.budget.of_envs(self.envs.try_restart)
        else:
            self.envs.try_restart()

    def _tell_steps(self, outcome: AnyOutcome) -> None:
        """Call the callbacks for steps and ends. If a callback raises, the lane's episode fails."""
        over, watches_steps = dict(self.steps.over(outcome)), self._events.watches_steps
        for lane, episode in self.steps.stepped(outcome):
            end = over.get(lane.index, ChunkEnd.ONGOING)
            if (
                lane.episode is None
                or lane.episode is not episode
                or not (watches_steps or end is not ChunkEnd.ONGOING)
            ):
                continue
            error = self._events.stepped(lane, episode, end)
            if error is not None:
                self.steps.withdraw(outcome, lane)
                outcome.failures.append(Failure(lane.index, error, stepped=True))
                self._abort(outcome.failures[-1], recorded=True)

    # -- episodes that begin ------------------------------------------------------------------------------------------

    def _start_episodes(self, bring_back: Callable[[], None]) -> None:
        """Call `bring_back`, which restarts failed envs and may begin episodes, and begin the chunks of these.

        If a callback fails a new episode, its lane restarts. Repeats until no lane is left to restart now. Raises what
        `bring_back` raises, after the chunks have begun.
        """
        refused = True
        while refused:
            try:
                bring_back()
            finally:
                # A lane that failed in between may have begun twice; its observation is from the second reset.
                begun = [self.envs.lanes[index] for index in dict.fromkeys(self.envs.take_started())]
                started = [lane for lane in begun if lane.episode is not None]
                if started:
                    self.steps.begin(started)
                refused = self._events.watches_starts and self._tell_starts(started)
            bring_back = self.envs.try_restart

    def _tell_starts(self, started: Sequence[Lane]) -> bool:
        """Return whether a callback's error has ended an episode at its start."""
        refused = False
        for lane in started:
            error = self._events.started(lane, lane.episode) if lane.episode is not None else None
            if error is not None:
                self._abort(Failure(lane.index, error, stepped=True), recorded=True)
                refused = True
        return refused

    # -- episodes that end, fail and are abandoned --------------------------------------------------------------------

    def _end_episodes(self, over: Collection[int], stop_at_episodes: int | None) -> None:
        now = time.perf_counter()
        for index in over:
            lane = self.envs.lanes[index]
            lane.budget.delivered()
            if lane.episode is not None:
                lane.episode.ended_at = now
        self._totals.episodes += len(over)
        self.envs.end_episodes(list(over))
        if stop_at_episodes is None or self.steps.episodes_ended < stop_at_episodes:
            timers = self._totals.timers
            timers.budget.of_envs(lambda: timers.timed("env_reset_timer", self.envs.try_reset)(list(over)))

    def _abort(self, failure: Failure, *, recorded: bool = False) -> None:
        """Discard the open steps of a lane whose env or callback failed, under the failure's reason, and its episode.

        `recorded` says that the last step was recorded already.
        """
        lane = self.envs.lanes[failure.lane]
        if lane.episode is not None:
            failure.view = self.steps.look_back(lane, lane.episode, failure)
            failure.task = failure.task or lane.episode.task
            self._note_aborted(lane.episode, failure.view)
            if self._events.watches_failures:
                self._events.aborted(failure.view, failure.reason)
        self.steps.lose(failure, recorded=recorded)
        self.envs.fail(failure)
        self.envs.end_episodes([failure.lane])

    def abandon(self, reason: Discard) -> None:
        """End every open episode. Undelivered steps are lost under `reason`; delivered parts get an end marker."""
        if self._events.watches_failures or reason is not Discard.RESET:
            for lane in self.envs.lanes:
                if lane.episode is not None:
                    view = self.steps.look(lane, lane.episode)
                    if reason is not Discard.RESET and len(view):
                        self._note_aborted(lane.episode, view)
                    if self._events.watches_failures:
                        self._events.aborted(view, reason)
        self.steps.lose_open(reason)
        self.envs.end_episodes(range(len(self.envs.lanes)))
        self.needs_reset = True

    def _note_aborted(self, episode: Episode, view: AnyEpisodeView) -> None:
        """Note the return and length of an aborted episode, unless it is excluded from training."""
        earned = view.episode_return
        if math.isfinite(earned) and episode.trains:
            self._totals.aborted.append((float(earned), len(view)))

    def finish(self, reason: Discard) -> None:
        """Abandon all episodes. A `cut` then returns the finished chunks, and end markers for the others."""
        self.abandon(reason)
        self.steps.open_fragments(1)

    def _drop_steps(self) -> None:
        self.abandon(Discard.RESET)
        self.steps.lose_ended(Discard.RESET)

    # -- cut, rebuild, close ------------------------------------------------------------------------------------------

    def cut(self, stamp: Stamp, *, keep_open: bool) -> Cut_co:
        """Return the chunks to deliver; with `keep_open` only those of whole episodes."""
        return self.steps.cut(stamp, keep_open=keep_open)

    def rebuild(self, config: EnvRunnerConfig) -> None:
        """Rebuild all envs. Open steps are lost, because the spaces may differ."""
        self._drop_steps()
        self.steps.rebuild(config)
        self.needs_rebuild = False

    def close(self) -> None:
        """Close all envs."""
        self.envs.stop()
