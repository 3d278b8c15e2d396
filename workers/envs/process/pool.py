"""Envs in processes of their own, driven from here without ever waiting for a certain one of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunk import ChunkEnd
from headrace.schemas.errors import EnvContractError, EnvError, EnvRaisedError
from headrace.schemas.spaces import Spaces
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.actions import write_actions
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.process.answers import Answers
from headrace.workers.envs.process.control import BEGAN, ENDS, NO_SEED, Command, Phase
from headrace.workers.envs.process.handle import Answer, ProcessHandle
from headrace.workers.envs.process.losses import failures_of
from headrace.workers.envs.process.pictures import picture_from_json
from headrace.workers.envs.process.placement import Placement, SeedFor
from headrace.workers.envs.process.processes import Processes
from headrace.workers.envs.process.reported import error_from_json
from headrace.workers.envs.process.shared import columns_layout, map_arrays
from headrace.workers.envs.process.terms import job_of, limits_of


class EnvProcessPool:
    """`config.num_envs` lanes in processes of `config.envs_per_process` envs each. One thread at a time.

    Only the constructor, `poll` and `stop` take time. Columns are views of memory that the processes write: nothing is
    copied when they answer, and a lane's row is true from its answer until it is stepped or reset again. A lane that
    has failed has no env until it is restarted. After n episodes, or grown too large, a process is replaced by a new
    one, into which each lane moves when its episode is over.
    """

    spaces: Spaces
    observations: dict[str, NDArray[Any]]
    """"obs/..." -> (num_envs, *shape): what each lane saw last."""
    first: dict[str, NDArray[Any]]
    """Likewise, the first observation of an episode that `begin` has not begun yet."""
    actions: dict[str, NDArray[Any]]
    """"actions/..." -> (num_envs, *shape): what each lane does next, written by `send_actions`."""
    rewards: NDArray[np.float64]
    """(num_envs,): of the last step."""

    def __init__(self, config: EnvRunnerConfig, worker_index: int = 0, seed_for: SeedFor | None = None) -> None:
        """Start all processes and build all envs. `seed_for` gives what their creators are told as `context.seed`.

        Raises `ConfigError` for an env that has no name in another process, `UnknownEnvError`, `EnvContractError` where
        spaces differ, `EnvHangError`, `EnvCrashError`, and `EnvError` caused by what else an env raised.
        """
        self.width = config.num_envs
        """Number of lanes."""
        self._config = config
        self._limits = limits_of(config)
        self._moving: dict[int, int] = {}
        """Lane -> seed of the reset that follows once it is built in its new process."""
        self._layout_of: int | None = None
        self._processes = Processes(self._job(config, worker_index), self._limits)
        self._placement = Placement(config, self._processes, seed_for)
        self._stopped = False
        try:
            self._build_all()
        except BaseException:
            self.stop()
            raise

    def _job(self, config: EnvRunnerConfig, worker_index: int) -> dict[str, Any]:
        return job_of(config, worker_index)

    def _build_all(self) -> None:
        waiting = set(range(self.width))
        for lane in waiting:
            self._build(lane, Command.BUILD)
        while waiting:
            answers = self.poll()
            for failure in answers.failures:
                if isinstance(failure.error, EnvError) and not isinstance(failure.error, EnvRaisedError):
                    raise failure.error
                what = f"env {failure.lane} ({self._config.env!r}) could not be built"
                raise EnvError(f"{what}: {failure.error}; check env and env_config") from failure.error
            waiting -= set(answers.built)

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [handle.pid for handle in self._processes]

    def has_env(self, lane: int) -> bool:
        """Whether the lane could be built by now; here all could, or there would be no pool."""
        return 0 <= lane < self.width

    # -- what lanes are to do -----------------------------------------------------------------------------------------

    def send_actions(
        self,
        lanes: Sequence[int] | None,
        columns: Mapping[str, NDArray[Any]],
        root: str = "actions",
        next_seeds: Mapping[int, int] | None = None,
    ) -> None:
        """Have `lanes` (None: all) step with their rows of the action columns below `root`, each (num_envs, *shape).

        A lane in `next_seeds` is reset with its seed in the same turn if that ends its episode, unless it must move.
        """
        write_actions(self.actions, lanes, columns, root)
        if lanes is None:
            self._step_all(next_seeds or {})
            return
        for lane in lanes:
            self._ask_step(lane, next_seeds or {})
        self._flush()

    def _step_all(self, next_seeds: Mapping[int, int]) -> None:
        seeds = np.array([next_seeds.get(lane, NO_SEED) for lane in range(self.width)], np.int64)
        for handle in self._processes:
            if self._placement.is_whole(handle):
                handle.step_all(seeds[handle.first_lane : handle.first_lane + handle.lanes])
            else:
                for lane in handle.members:
                    self._ask_step(lane, next_seeds)
                handle.flush()

    def _ask_step(self, lane: int, next_seeds: Mapping[int, int]) -> None:
        seed = next_seeds.get(lane, NO_SEED) if self._placement.may_stay(lane) else NO_SEED
        self._placement.home(lane).ask(lane, Command.STEP, seed)

    def try_reset(self, lane: int, seed: int) -> None:
        """Have the lane reset its env. It answers in `Answers.began`, or with a failure."""
        if self._placement.may_stay(lane):
            self._placement.home(lane).ask(lane, Command.RESET, seed)
        else:
            self._build(lane, Command.BUILD)
            self._moving[lane] = seed

    def try_restart(self, lane: int) -> None:
        """Have the lane's env built anew, in a new process if need be. It answers in `built`, or with a failure."""
        self._build(lane, Command.REBUILD)

    def try_render(self, lane: int) -> None:
        """Have a lane that has an env, and is asked for nothing else, show it. It answers in `Answers.pictures`."""
        self._placement.home(lane).ask(lane, Command.RENDER)

    def begin(self, lanes: Sequence[int]) -> None:
        """What these lanes see is now the first observation of their next episode."""
        for name, column in self.observations.items():
            column[lanes] = self.first[name][lanes]

    # -- what they answer ---------------------------------------------------------------------------------------------

    def poll(self, timeout_s: float = math.inf, batch_wait_s: float = 0.0) -> Answers:
        """What has been answered, as soon as there is anything.

        Once there is, waits up to `batch_wait_s` for the steps and resets that are under way besides. Sleeps, for
        `timeout_s` at most; returns at once when nothing was asked.
        """
        answers, until = Answers(), time.monotonic() + timeout_s
        together = batch_wait_s >= timeout_s  # then nothing is to be done about the first before the last
        self._flush()
        while True:
            busy = any(handle.is_busy for handle in self._processes)
            awaited = self._awaited if together or answers else 1
            lost = self._take(answers, until if busy else 0.0, awaited)
            now = time.monotonic()
            if answers:
                if lost:
                    return answers
                until = min(until, now + batch_wait_s)
                busy = self._awaited > 0
            if not busy or now >= until:
                return answers

    @property
    def _awaited(self) -> int:
        return sum(handle.awaited for handle in self._processes if handle.is_trusted)

    def _flush(self) -> None:
        for handle in self._processes:
            handle.flush()

    def _take(self, answers: Answers, until: float, awaited: int) -> bool:
        """Hear who speaks, once `awaited` have answered; whether a process has ended."""
        speaking, ended = self._processes.wait(until, awaited)
        for handle in speaking:
            self._hear(handle, answers)
        if not answers:  # else the next poll tells of it: no lane has answered and is lost in the same breath
            for handle in ended:
                self._lose(handle, answers)
        self._processes.enforce()
        if speaking or ended:  # who has answered can be told what was asked meanwhile
            self._flush()
        return bool(ended)

    def _hear(self, handle: ProcessHandle, answers: Answers) -> None:
        for answer in handle.receive():
            if not handle.is_trusted:
                return
            stepped = answer.order.stepping
            if answer.told:
                stepped = self._read(handle, answer.told, stepped, answers)
            answers.stepped += stepped
            if answer.slot.counts[0]:
                self._read_outcomes(handle, answer, answers)
        self._placement.weigh(handle)

    def _read_outcomes(self, handle: ProcessHandle, answer: Answer, answers: Answers) -> None:
        """Of each lane, whether its episode ended, and another one began."""
        infos = dict(answer.told.get("began", ()))
        outcomes = answer.slot.outcomes.tolist()
        for index, outcome in enumerate(outcomes):
            if outcome & ENDS:
                answers.ended.append((handle.first_lane + index, ChunkEnd(outcome & ENDS)))
            if outcome & BEGAN:
                answers.began.append((handle.first_lane + index, infos.get(index, {})))
                handle.episodes += 1

    def _read(
        self, handle: ProcessHandle, told: dict[str, Any], stepped: Sequence[int], answers: Answers
    ) -> Sequence[int]:
        """Take in what was said besides the columns; of the lanes that `stepped`, those that did not fail."""
        first = handle.first_lane
        for index, at, returned, error in told.get("failures", ()):
            self._fail(Failure(first + index, error_from_json(error), stepped=returned, at=at), answers)
        failed = {failure.lane for failure in answers.failures if failure.at == "step"}
        answers.infos += [(first + i, info) for i, info in told.get("infos", ()) if first + i not in failed]
        answers.pictures += [(first + i, picture_from_json(shown, first + i)) for i, shown in told.get("pictures", ())]
        for index, spaces in told.get("built", ()):
            self._welcome(first + index, Spaces.model_validate(spaces), answers)
        return [lane for lane in stepped if lane not in failed]

    def _fail(self, failure: Failure, answers: Answers) -> None:
        self._moving.pop(failure.lane, None)
        self._placement.leave(failure.lane)
        answers.failures.append(failure)

    def _welcome(self, lane: int, spaces: Spaces, answers: Answers) -> None:
        """A lane was built."""
        if self._layout_of is None:
            self._layout_of = lane
            self._map(spaces)
        elif spaces != self.spaces:
            expected = f"those of env {self._layout_of}, {self.spaces!r}"
            error = EnvContractError(f"spaces of env {lane}", repr(spaces), expected)
            self._fail(Failure(lane, error, at="construction"), answers)
            return
        if lane in self._moving:
            self._placement.home(lane).ask(lane, Command.RESET, self._moving.pop(lane))
        else:
            answers.built.append(lane)

    def _map(self, spaces: Spaces) -> None:
        self.spaces = spaces
        arrays = map_arrays(self._processes.memory, columns_layout(spaces, self.width), create=True)
        self.rewards = arrays.pop("rewards")
        self.observations = {name: column for name, column in arrays.items() if name.partition("/")[0] == "obs"}
        self.first = {name: arrays[f"first{name[3:]}"] for name in self.observations}
        self.actions = {name: column for name, column in arrays.items() if name.partition("/")[0] == "actions"}

    def _lose(self, handle: ProcessHandle, answers: Answers) -> None:
        ending = self._processes.bury(handle)
        self._placement.lose(handle)
        for lane in handle.members:
            self._moving.pop(lane, None)
        lanes, call = set(handle.members), ending.call
        if call.phase is Phase.CLOSE and call.lane is not None and call.lane in lanes:
            # It died of the env that was to make room there, for which the one to come pays nothing.
            lanes.discard(call.lane)
            self._build(call.lane, Command.REBUILD)
        answers.failures += failures_of(ending, lanes, self._limits)

    def _build(self, lane: int, command: Command) -> None:
        """Have an env built for the lane, where it is to live now."""
        self._placement.build(lane, command)

    def stop(self) -> None:
        """Close all envs, and end all processes, within `env_close_timeout_s`. May be called twice."""
        if not self._stopped:
            self._stopped = True
            self._processes.stop(self._config.env_close_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
