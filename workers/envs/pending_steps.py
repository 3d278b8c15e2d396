"""Steps under way in the envs of a backend: all envs together, or each in its own time.

Other replies that arrive meanwhile are set aside for later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.task import Task
from headrace.schemas.errors import EnvError
from headrace.workers.envs.backend import EnvBackend, NextSeeds, PoolBackend, Replies
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.inline import InlineEnvs
from headrace.workers.envs.lane import Episode
from headrace.workers.envs.lane_table import WAIT_SLICE_S, LaneTable
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.recovery import LaneRecovery
from headrace.workers.envs.sequential_step import Outcome

Columns = dict[str, NDArray[Any]]
OnWait = Callable[[], None] | None


class SetAside:
    """Replies that came while the vector waited for something else."""

    def __init__(self, table: LaneTable) -> None:
        self.ahead: dict[int, tuple[int | None, Task | None, dict[str, Any]]] = {}
        """Lane -> (seed, task, info) of a reset that is done, for an episode that has not begun."""
        self.ordered: dict[int, tuple[int | None, Task | None]] = {}
        """Lane -> (seed, task) of the reset that its newest step orders, of lanes with tasks."""
        self.lost: dict[int, Failure] = {}
        """Failures of lanes that had nothing to do. The next step or reset of the lane tells them."""
        self.coming: dict[int, Episode | None] = {}
        """Lanes that are being rebuilt or reset, and the episode that begins there, once that is known."""
        self.built: list[int] = []
        self.arrived: list[tuple[int, dict[str, Any]]] = []
        """(lane, info) of resets that lanes in `coming` have waited for."""
        self._table = table

    def keep(self, replies: Replies, but: Container[int] = ()) -> None:
        """Keep the replies of lanes other than those in `but`."""
        self.built += replies.built
        for index, info in replies.began:
            if index in self.coming:
                self.arrived.append((index, info))
            elif index not in but:
                known = self.ordered.pop(index, None) or (self._table.lanes[index].seeds.peek(), None)
                self.ahead[index] = *known, info
        for failure in replies.failures:
            if failure.lane in self.coming:
                failure.unbegun = self.coming.pop(failure.lane)
                self._table.failed.append(failure)
            elif failure.lane not in but:
                self.lost[failure.lane] = failure
                failure.task = self.ordered.get(failure.lane, (None, None))[1]


def hear(backend: EnvBackend, on_wait: OnWait) -> Replies:
    """Return the next replies, of any lanes. Calls `on_wait` from time to time until there are some."""
    while not (replies := backend.step_wait(WAIT_SLICE_S, batch_wait_s=WAIT_SLICE_S)):
        if on_wait is not None:
            on_wait()
    return replies


class Steps(ABC):
    """Decides when the envs of a vector step, and how a poll waits. This base has no step under way between polls."""

    waits_for_resets = True
    """True if a new reset is waited for; else a later poll finds that the episode has begun."""

    def __init__(self, backend: EnvBackend, table: LaneTable, recovery: LaneRecovery, aside: SetAside) -> None:
        self.halves: list[NDArray[np.intp]] = []
        """Lanes that act together when all of them that are live can; none: each lane acts when it can."""
        self._backend = backend
        self._table = table
        self._recovery = recovery
        self._aside = aside

    def observations(self) -> Observations:
        """Return the observations of lanes. A lane's row is valid until it is stepped."""
        backend = self._backend
        return Observations(backend.spaces.observation, backend.width, check_bounds=False, columns=backend.observations)

    @abstractmethod
    def send_all(self, columns: Columns, on_wait: OnWait, *, resets_ahead: bool) -> None:
        """Step all live lanes. `resets_ahead`: an env may be reset in the step that ends its episode."""

    @abstractmethod
    def send(self, lanes: Sequence[int], columns: Columns, *, resets_ahead: bool) -> None:
        """Step `lanes`, which are live and not under way. `resets_ahead` as above."""

    @abstractmethod
    def poll(self, on_wait: OnWait) -> Outcome:
        """Return the results of the steps."""

    def _seeds_of(self, lanes: Sequence[int]) -> NextSeeds:
        """Return the seeds for resets of lanes whose step ends their episode, and tell the backend their tasks."""
        own, draws, ordered = self._table.lanes, self._table.tasks, self._aside.ordered
        if not (draws or ordered or self._backend.tasks):
            return {lane: own[lane].seeds.peek() for lane in lanes}
        for lane in lanes:
            seed, task, _ = draws.peek(lane, own[lane].episodes_begun)
            ordered[lane] = own[lane].seeds.peek() if seed is None else seed, task
        self._backend.tell_tasks({lane: ordered[lane][1] for lane in lanes})
        return {lane: (ordered[lane] if draws else ordered.pop(lane))[0] for lane in lanes}

    @property
    def under_way(self) -> set[int]:
        """Live lanes whose action has no reply, or whose reply no poll has returned."""
        return set()

    def is_stepping(self, lane: int) -> bool:
        """Return whether a step of the lane is under way, abandoned or not."""
        return False

    def keep(self, replies: Replies, but: Container[int] = ()) -> None:
        """Keep replies for later polls and resets, of lanes other than those in `but`."""
        self._aside.keep(replies, but)

    def catch_up(self, on_wait: OnWait) -> None:  # noqa: B027 - nothing is under way
        """Wait for steps whose outcome the sampler no longer needs."""

    def abandon(self, lanes: Iterable[int]) -> None:  # noqa: B027 - nothing is under way
        """Ignore a step that is under way in one of `lanes`, because its episode is over."""

    def show(self, lane: int) -> None:  # noqa: B027 - the backend's own columns are shown
        """Show the first observation of an episode in `lane`."""


class InlineSteps(Steps):
    """All live lanes step together, in envs of this process, while `poll` is called."""

    _backend: InlineEnvs

    def send_all(self, columns: Columns, on_wait: OnWait, *, resets_ahead: bool) -> None:
        """Step all live lanes in the next poll."""
        up = self._recovery
        self._backend.step_async(None if up.are_all_up else [lane.index for lane in up.up], columns)

    def send(self, lanes: Sequence[int], columns: Columns, *, resets_ahead: bool) -> None:
        """Step `lanes` in the next poll."""
        self._backend.step_async(lanes, columns)

    def poll(self, on_wait: OnWait) -> Outcome:
        """Step the envs."""
        return self._backend.step()


class LockSteps(Steps):
    """All live lanes step together, and a poll waits until each has replied."""

    _backend: PoolBackend
    _sent: Sequence[int] = ()

    def send_all(self, columns: Columns, on_wait: OnWait, *, resets_ahead: bool) -> None:
        """Step all live lanes, except those that have failed since."""
        self.catch_up(on_wait)
        self.send([lane.index for lane in self._recovery.up], columns, resets_ahead=resets_ahead)

    def send(self, lanes: Sequence[int], columns: Columns, *, resets_ahead: bool) -> None:
        """Step all `lanes`, except those that have failed since."""
        lost = self._aside.lost
        self._sent = [lane for lane in lanes if lane not in lost] if lost else lanes
        everybody = len(self._sent) == self._backend.width
        seeds = self._seeds_of(self._sent) if resets_ahead else None
        self._backend.step_async(None if everybody else self._sent, columns, seeds)

    def poll(self, on_wait: OnWait) -> Outcome:
        """Wait for all lanes that were sent an action. An env that hangs is awaited until its deadline."""
        aside, failures = self._aside, list[Failure]()
        ended: list[tuple[int, ChunkEnd]] = []
        also_truncated: list[int] = []
        infos: list[tuple[int, dict[str, Any]]] = []
        if aside.lost:
            up = [lane.index for lane in self._recovery.up]
            failures = [aside.lost.pop(index) for index in up if index in aside.lost]
        waiting: Sequence[int] | set[int] = self._sent
        while waiting:
            replies = hear(self._backend, on_wait)
            failed: list[Failure] = []
            if len(replies.stepped) == len(waiting) and not replies.failures:
                waiting = ()
            else:
                waiting = set(waiting).difference(replies.stepped)
                failed = [failure for failure in replies.failures if failure.lane in waiting]
                failures += failed
                waiting.difference_update(failure.lane for failure in failed)
            if replies.failures or replies.began or replies.built:
                aside.keep(replies, but={failure.lane for failure in failed})
            ended += replies.ended
            also_truncated += replies.also_truncated
            infos += [(lane, self._table.hear(info)) for lane, info in replies.infos]
        self._sent = ()
        return Outcome(self._rewards(failures), ended, failures, infos, also_truncated=also_truncated)

    def _rewards(self, failures: Sequence[Failure]) -> NDArray[np.float64]:
        live = self._recovery.live
        rewards = self._backend.rewards.copy() if live is None else self._backend.rewards[live]
        if failures:
            lanes = np.arange(self._backend.width) if live is None else live
            rewards[np.isin(lanes, [failure.lane for failure in failures])] = 0.0
        return rewards

    def catch_up(self, on_wait: OnWait) -> None:
        """Finish a poll that `on_wait` interrupted by raising. An episode that lost a step by it fails."""
        if self._sent:
            broken = [index for index in self._sent if self._table.lanes[index].episode is not None]
            lost = self._aside.lost
            lost |= {index: Failure(index, EnvError("a poll was interrupted during its step")) for index in broken}
            lost |= {failure.lane: failure for failure in self.poll(on_wait).failures}


class ReadySteps(Steps):
    """Each lane steps at its own pace. Steps, resets and restarts do not wait for other lanes, only abandoned steps.

    A backend writes its columns while the policy acts, so a poll copies the observations that it reports.
    """

    _backend: PoolBackend
    waits_for_resets = False

    def __init__(self, backend: EnvBackend, table: LaneTable, recovery: LaneRecovery, aside: SetAside) -> None:
        super().__init__(backend, table, recovery, aside)
        every, config = np.arange(backend.width), table.config
        # Neighbours share a process or a host, so one half acts while the other half is stepped.
        self.halves = [every[::2], every[1::2]] if config.double_buffering and len(every) > 1 else []
        self._batch_wait_s = (config.remote_env_batch_wait_ms or 0.0) / 1000.0
        self._waiting: set[int] = set()
        """Lanes that were sent an action and have not replied."""
        self._abandoned: set[int] = set()
        """Lanes in `_waiting` whose episode is over."""
        self._stepped: list[int] = []
        """Lanes whose replies the next poll tells, with what there is to tell."""
        self._ended: list[tuple[int, ChunkEnd]] = []
        self._infos: list[tuple[int, dict[str, Any]]] = []
        self._failed: list[Failure] = []

    def observations(self) -> Observations:
        """Return the observations of lanes, in columns of their own."""
        self._shown = Observations(self._backend.spaces.observation, self._backend.width, check_bounds=False)
        return self._shown

    @property
    def under_way(self) -> set[int]:
        """Live lanes whose action has no reply, or whose reply no poll has returned."""
        untold = {*self._stepped, *(failure.lane for failure in self._failed)}
        return (self._waiting - self._abandoned) | untold

    def send_all(self, columns: Columns, on_wait: OnWait, *, resets_ahead: bool) -> None:
        """Step all live lanes. No step may be under way."""
        self.send([lane.index for lane in self._recovery.up], columns, resets_ahead=resets_ahead)

    def send(self, lanes: Sequence[int], columns: Columns, *, resets_ahead: bool) -> None:
        """Step `lanes`, which are live and not under way. Does not block."""
        lost = self._aside.lost
        self._failed += [lost.pop(lane) for lane in lanes if lane in lost]
        failed = {failure.lane for failure in self._failed}
        sent = [lane for lane in lanes if lane not in failed]
        self._waiting.update(sent)
        if sent:
            self._backend.step_async(sent, columns, self._seeds_of(sent) if resets_ahead else None)

    def poll(self, on_wait: OnWait) -> Outcome:
        """Wait until a lane can act or the caller has other work, then return the results."""
        self._listen(0.0 if self._has_news else WAIT_SLICE_S)
        while not self._has_news:
            if on_wait is not None:
                on_wait()
            self._listen(WAIT_SLICE_S)
        return self._take_news()

    def _listen(self, timeout_s: float) -> None:
        wait = self._batch_wait_s
        if replies := self._backend.step_wait(timeout_s + wait, batch_wait_s=wait):
            self.keep(replies)

    @property
    def _has_news(self) -> bool:
        """Return whether a lane can act, or the caller has other work, such as a rebuild."""
        table = self._table
        if self._aside.built or self._aside.arrived or table.failed or table.next_due_s() == 0.0:
            return True
        waiting, live = self._waiting - self._abandoned, {lane.index for lane in self._recovery.up}
        if not self.halves:
            return len(waiting) < len(live)
        halves = map(np.ndarray.tolist, self.halves)
        return any(waiting.isdisjoint(half) and not live.isdisjoint(half) for half in halves)

    def _take_news(self) -> Outcome:
        stepped, failures = self._stepped, self._failed
        lanes = np.array(sorted([*stepped, *(failure.lane for failure in failures)]), np.intp)
        rewards = self._backend.rewards[lanes]
        if failures:
            rewards[np.isin(lanes, [failure.lane for failure in failures])] = 0.0
        self._show(stepped)
        outcome = Outcome(rewards, self._ended, failures, self._infos, lanes=lanes)
        self._stepped, self._ended, self._infos, self._failed = [], [], [], []
        return outcome

    def keep(self, replies: Replies, but: Container[int] = ()) -> None:
        """Keep the replies that belong to the next poll, and set the others aside."""
        stepped = [lane for lane in replies.stepped if lane in self._waiting]
        self._waiting.difference_update(stepped)
        wanted = set(stepped) - self._abandoned
        failed = [failure for failure in replies.failures if failure.lane in self._waiting - self._abandoned]
        over = {failure.lane for failure in replies.failures}
        self._waiting -= over
        self._abandoned -= over | set(stepped)
        self._stepped += [lane for lane in stepped if lane in wanted]
        self._ended += [(lane, end) for lane, end in replies.ended if lane in wanted]
        self._infos += [(lane, self._table.hear(info)) for lane, info in replies.infos if lane in wanted]
        self._failed += failed
        self._aside.keep(replies, but={failure.lane for failure in failed})

    def catch_up(self, on_wait: OnWait) -> None:
        """Wait for abandoned steps, because a lane can be reset only when its step is done."""
        while self._abandoned:
            self.keep(hear(self._backend, on_wait))

    def is_stepping(self, lane: int) -> bool:
        """Return whether a step of the lane is under way, abandoned or not."""
        return lane in self._waiting

    def abandon(self, lanes: Iterable[int]) -> None:
        """Ignore a step that is under way in one of `lanes`."""
        over = set(lanes)
        self._abandoned |= self._waiting & over
        if self._stepped or self._failed:
            self._stepped = [lane for lane in self._stepped if lane not in over]
            self._ended = [(lane, end) for lane, end in self._ended if lane not in over]
            self._infos = [(lane, info) for lane, info in self._infos if lane not in over]
            self._aside.lost |= {failure.lane: failure for failure in self._failed if failure.lane in over}
            self._failed = [failure for failure in self._failed if failure.lane not in over]

    def show(self, lane: int) -> None:
        """Copy the first observation of an episode in `lane`."""
        self._show([lane])

    def _show(self, lanes: Sequence[int]) -> None:
        for name, column in self._backend.observations.items():
            self._shown.columns[name][lanes] = column[lanes]
