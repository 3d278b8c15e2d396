"""Envs in processes of their own. Their driver never waits for one particular process."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.accounts.user_calls import CallInProgress, UserCall
from headrace.schemas.basics.closable import Closable
from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.chunks.task import Task
from headrace.schemas.errors import EnvContractError, EnvError, EnvRaisedError
from headrace.schemas.settings.sampling_settings import ENV_CLOSE_TIMEOUT_S
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.actions import action_root, write_actions
from headrace.workers.envs.backend import NextSeeds, PoolBackend, Replies
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.process.control import ALSO_TRUNCATED, BEGAN, ENDS, NO_SEED, Command, Phase, order_seed
from headrace.workers.envs.process.error_json import error_from_json
from headrace.workers.envs.process.exits import failures_of
from headrace.workers.envs.process.handle import ProcessHandle, ProcessReply
from headrace.workers.envs.process.job_settings import job_of, limits_of
from headrace.workers.envs.process.lane_homes import LaneHomes, SeedFor
from headrace.workers.envs.process.processes import Processes
from headrace.workers.envs.process.shared_arrays import columns_layout, map_arrays
from headrace.workers.envs.rendering import picture_from_json


def open_processes(table: LaneTable) -> EnvProcessPool:
    """Start all processes and build all envs that the table's config asks for. Raises what `EnvProcessPool` does."""
    with table.totals.calls.of(UserCall.PROCESSES, 0):
        pool = EnvProcessPool(table.config, table.worker_index, table.making_seed)
    table.totals.calls.elsewhere = pool.longest_call
    pool.note_outside = table.note_outside
    return pool


class EnvProcessPool(PoolBackend, Closable):
    """A `PoolBackend` of `config.num_envs` lanes in processes of `config.envs_per_process` envs each, for one thread.

    Only the constructor, `step_wait` and `close` take time. Columns are views of memory that the processes write, so
    replies need no copy. A lane's row is valid from its reply until the lane is stepped or reset again. A lane that has
    failed has no env until it is rebuilt. After n episodes, or when it grows too large, a process is replaced by a new
    one; each lane moves there when its episode is over.
    """

    def __init__(
        self, config: EnvRunnerConfig, worker_index: int = 0, seed_for: SeedFor | None = None, **told: Any
    ) -> None:
        """Start all processes and build all envs. `seed_for` returns the `context.seed` of their creators.

        `told`: fields of the `ProcessJob` that the config does not have.

        Raises `ConfigError` for an env that has no name in another process, `UnknownEnvError`, `EnvContractError` where
        spaces differ, `EnvHangError`, `EnvCrashError`, and `EnvError` caused by any other error of an env.
        """
        self.width = config.num_envs
        self._config = config
        self._limits = limits_of(config)
        self._moving: dict[int, int] = {}
        """Lane -> seed of the reset that follows when the lane is built in its new process."""
        self.tasks = {}
        self._layout_of: int | None = None
        self._processes = Processes({**job_of(config, worker_index), **told}, self._limits)
        self._homes = LaneHomes(config, self._processes, seed_for)
        self._stopped = False
        try:
            self._build_all()
        except BaseException:
            self.close()
            raise

    def _build_all(self) -> None:
        waiting = set(range(self.width))
        for lane in waiting:
            self._build(lane, Command.BUILD)
        while waiting:
            replies = self.step_wait()
            for failure in replies.failures:
                if isinstance(failure.error, EnvError) and not isinstance(failure.error, EnvRaisedError):
                    raise failure.error
                what = f"env {failure.lane} ({self._config.env!r}) could not be built"
                raise EnvError(f"{what}: {failure.error}; check env and env_config") from failure.error
            waiting -= set(replies.built)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run now."""
        return [handle.pid for handle in self._processes]

    def longest_call(self) -> str:
        """Say which call of an env has been in progress longest; "" while none is."""
        calls = [(handle, *handle.control.doing) for handle in self._processes if handle.is_busy]
        calls = [call for call in calls if call[1] >= 0 and call[2].name in UserCall.__members__]
        if not calls:
            return ""
        handle, lane, phase, since = min(calls, key=lambda call: call[3])
        call = CallInProgress(UserCall[phase.name], handle.first_lane + lane, self._limits[phase])
        return call.in_words(time.monotonic() - since)

    # -- orders to lanes ----------------------------------------------------------------------------------------------

    def step_async(
        self, lanes: Sequence[int] | None, columns: Mapping[str, NDArray[Any]], next_seeds: NextSeeds | None = None
    ) -> None:
        """Have `lanes` (None: all) step with their rows of the policy's action columns, each (num_envs, *shape).

        A lane in `next_seeds` is reset with its seed in the same call if the step ends its episode, unless the lane
        must move to another process.
        """
        write_actions(self.actions, lanes, columns, action_root(columns))
        if lanes is None:
            self._step_all(next_seeds or {})
            return
        for lane in lanes:
            self._ask_step(lane, next_seeds or {})
        self._flush()

    def _step_all(self, next_seeds: NextSeeds) -> None:
        seeds = np.array([order_seed(next_seeds.get(lane, NO_SEED)) for lane in range(self.width)], np.int64)
        for handle in self._processes:
            if self._homes.is_whole(handle):
                handle.step_all(seeds[handle.first_lane : handle.first_lane + handle.lanes])
            else:
                for lane in handle.members:
                    self._ask_step(lane, next_seeds)
                handle.flush()

    def _ask_step(self, lane: int, next_seeds: NextSeeds) -> None:
        seed = next_seeds.get(lane, NO_SEED) if self._homes.may_stay(lane) else NO_SEED
        self._homes.home(lane).ask(lane, Command.STEP, order_seed(seed))

    def tell_tasks(self, tasks: Mapping[int, Task | None]) -> None:
        """Tell the lanes' processes. A lane that moves tells its new process once its env is built there."""
        before = {lane: self.tasks.get(lane) for lane in tasks}
        super().tell_tasks(tasks)
        for lane, values in before.items():
            if self.tasks.get(lane) is not values and self._homes.may_stay(lane):
                self._homes.home(lane).tell_task(lane, self.tasks.get(lane))

    def keeps_env(self, lane: int) -> bool:
        """Return whether `reset` resets the lane's current env. Otherwise the lane moves to a new process."""
        return self._homes.may_stay(lane)

    def reset(self, lane: int, seed: int | None) -> None:
        """Reset the lane's env, without a seed if that is None. The reply is in `began`, or a failure."""
        if self._homes.may_stay(lane):
            self._homes.home(lane).ask(lane, Command.RESET, order_seed(seed))
        else:
            self._build(lane, Command.BUILD)
            self._moving[lane] = order_seed(seed)

    def rebuild(self, lane: int) -> None:
        """Rebuild the lane's env, in a new process if need be. The reply is in `built`, or a failure."""
        self._build(lane, Command.REBUILD)

    def render(self, lane: int) -> None:
        self._homes.home(lane).ask(lane, Command.RENDER)

    # -- replies ------------------------------------------------------------------------------------------------------

    def step_wait(self, timeout_s: float = math.inf, batch_wait_s: float = 0.0) -> Replies:
        """Return all replies, as soon as there is one.

        Then waits up to `batch_wait_s` for the steps and resets that are under way. Sleeps `timeout_s` at most. Does
        not wait if no order is under way.
        """
        replies, until = Replies(), time.monotonic() + timeout_s
        together = batch_wait_s >= timeout_s  # then the driver has nothing to do before the last reply
        self._flush()
        while True:
            busy = any(handle.is_busy for handle in self._processes)
            awaited = self._awaited if together or replies else 1
            lost = self._take(replies, until if busy else 0.0, awaited)
            now = time.monotonic()
            if replies:
                if lost:
                    return replies
                until = min(until, now + batch_wait_s)
                busy = self._awaited > 0
            if not busy or now >= until:
                return replies

    @property
    def _awaited(self) -> int:
        return sum(handle.awaited for handle in self._processes if handle.is_trusted)

    def _flush(self) -> None:
        for handle in self._processes:
            handle.flush()

    def _take(self, replies: Replies, until: float, awaited: int) -> bool:
        """Take replies once `awaited` orders have theirs, and return whether a process has ended."""
        speaking, ended = self._processes.wait(until, awaited)
        for handle in speaking:
            self._hear(handle, replies)
        if not replies:  # else the next call reports it, so that no lane both replies and is lost in one
            for handle in ended:
                self._lose(handle, replies)
        self._processes.enforce()
        if speaking or ended:  # a process that has replied can take new orders
            self._flush()
        return bool(ended)

    def _hear(self, handle: ProcessHandle, replies: Replies) -> None:
        for answer in handle.receive():
            if not handle.is_trusted:
                return
            stepped = answer.order.stepping
            if answer.told:
                stepped = self._read(handle, answer.told, stepped, replies)
            replies.stepped += stepped
            if answer.slot.counts[0]:
                self._read_outcomes(handle, answer, replies)
        self._homes.weigh(handle)

    def _read_outcomes(self, handle: ProcessHandle, answer: ProcessReply, replies: Replies) -> None:
        """Note of each lane whether its episode ended, and whether another one began."""
        infos = dict(answer.told.get("began", ()))
        outcomes = answer.slot.outcomes.tolist()
        for index, outcome in enumerate(outcomes):
            if outcome & ENDS:
                replies.ended.append((handle.first_lane + index, ChunkEnd(outcome & ENDS)))
            if outcome & ALSO_TRUNCATED:
                replies.also_truncated.append(handle.first_lane + index)
            if outcome & BEGAN:
                replies.began.append((handle.first_lane + index, infos.get(index, {})))
                handle.episodes += 1

    def _read(
        self, handle: ProcessHandle, told: dict[str, Any], stepped: Sequence[int], replies: Replies
    ) -> Sequence[int]:
        """Take in the JSON part of a reply. Return the lanes of `stepped` that did not fail."""
        first = handle.first_lane
        for index, at, returned, error in told.get("failures", ()):
            self._fail(Failure(first + index, error_from_json(error), stepped=returned, at=at), replies)
        failed = {failure.lane for failure in replies.failures if failure.at == "step"}
        replies.infos += [(first + i, info) for i, info in told.get("infos", ()) if first + i not in failed]
        if (note := self.note_outside) is not None:
            for observations, farthest in told.get("outside", ()):
                note(observations, farthest)
        replies.pictures += [(first + i, picture_from_json(shown, first + i)) for i, shown in told.get("pictures", ())]
        for index, spaces in told.get("built", ()):
            self._welcome(first + index, Spaces.model_validate(spaces), replies)
        return [lane for lane in stepped if lane not in failed]

    def _fail(self, failure: Failure, replies: Replies) -> None:
        self._moving.pop(failure.lane, None)
        self._homes.leave(failure.lane)
        replies.failures.append(failure)

    def _welcome(self, lane: int, spaces: Spaces, replies: Replies) -> None:
        """Note that a lane's env was built, and check its spaces."""
        if self._layout_of is None:
            self._layout_of = lane
            self._map(spaces)
        elif spaces != self.spaces:
            expected = f"those of env {self._layout_of}, {self.spaces!r}"
            error = EnvContractError(f"spaces of env {lane}", repr(spaces), expected)
            self._fail(Failure(lane, error, at="construction"), replies)
            return
        if lane in self.tasks:
            self._homes.home(lane).tell_task(lane, self.tasks[lane])
        if lane in self._moving:
            self._homes.home(lane).ask(lane, Command.RESET, self._moving.pop(lane))
        else:
            replies.built.append(lane)

    def _map(self, spaces: Spaces) -> None:
        self.take_spaces(spaces)
        arrays = map_arrays(self._processes.memory, columns_layout(spaces, self.width), create=True)
        self.rewards = arrays.pop("rewards")
        self.observations = {name: column for name, column in arrays.items() if name.partition("/")[0] == "obs"}
        self.first = {name: arrays[f"first{name[3:]}"] for name in self.observations}
        self.actions = {name: column for name, column in arrays.items() if name.partition("/")[0] == "actions"}

    def _lose(self, handle: ProcessHandle, replies: Replies) -> None:
        ending = self._processes.bury(handle)
        self._homes.lose(handle)
        for lane in handle.members:
            self._moving.pop(lane, None)
        lanes, call = set(handle.members), ending.call
        if call.phase is Phase.CLOSE and call.lane is not None and call.lane in lanes:
            # The process died while it closed this env to make room. The lane's next env does not pay for that failure.
            lanes.discard(call.lane)
            self._build(call.lane, Command.REBUILD)
        replies.failures += failures_of(ending, lanes, self._limits)

    def _build(self, lane: int, command: Command) -> None:
        """Build an env for the lane, in the lane's newest process."""
        self._homes.build(lane, command)

    def close(self) -> None:
        """Close all envs, and end all processes, within 5 s. May be called twice."""
        if not self._stopped:
            self._stopped = True
            self._processes.stop(ENV_CLOSE_TIMEOUT_S)
