"""The envs of one process: built, reset and stepped as their driver commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel

from headrace.schemas.errors import EnvContractError
from headrace.schemas.spaces import Spaces
from headrace.workers.envs.actions import to_env_form
from headrace.workers.envs.checks import take_reset_apart
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator, build_env, find_creator
from headrace.workers.envs.error_text import brief
from headrace.workers.envs.lane import close_envs
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.process.control import BEGAN, NO_SEED, Command, Control, Phase, Slot
from headrace.workers.envs.process.error_json import error_to_json
from headrace.workers.envs.process.pictures import picture_to_json
from headrace.workers.envs.process.shared_arrays import columns_layout, map_arrays
from headrace.workers.envs.spaces import spaces_of
from headrace.workers.envs.stepping import step_all

BuildEnv = Callable[[EnvCreator, EnvContext, bool | None], tuple[Any, Spaces]]
"""(creator, context, whether it must be of several agents; None: either) -> an env in rows of columns, its spaces."""


def build_solo_env(creator: EnvCreator, context: EnvContext, several_agents: bool | None) -> tuple[Any, Spaces]:
    """Return one env of one agent, and its spaces: a `BuildEnv` that knows no other kind."""
    env = build_env(creator, context)
    return env, spaces_of(env)


class ProcessJob(BaseModel):
    """What a process is told at its start. Descriptors are inherited ones."""

    env: str
    env_config: dict[str, Any]
    worker_index: int
    num_workers: int
    num_envs: int
    """Of the runner; what an env's creator is told, as the two above."""
    first_lane: int
    """Of the process' lanes, which follow one another."""
    lanes: int
    width: int
    """Lanes of the whole pool, and rows of each column."""
    check_bounds: bool
    several_agents: bool | None
    """What `BuildEnv` is told: whether envs must be multi-agent ones, which are packed then; None: either."""
    close_timeout_s: float
    import_path: list[str]
    """`sys.path` of the driver."""
    socket: int
    bell: int
    told: int
    latch_tokens: int
    latch_bell: int
    control: int
    columns: int
    lifeline: int
    last_words: int
    """Where the Python stack goes in a crash, or when the driver asks for it."""

    @property
    def descriptors(self) -> list[int]:
        """All that are inherited."""
        bells = [self.bell, self.told, self.latch_tokens, self.latch_bell]
        return [self.socket, *bells, self.control, self.columns, self.lifeline, self.last_words]


class Sends(Protocol):
    """What sends a body that is told with the next answer."""

    def send(self, body: bytes) -> None: ...


@dataclass(slots=True, eq=False)
class _LaneEnv:
    index: int
    env: gym.Env[Any, Any] | None = None
    step: Callable[[Any], Any] | None = None
    spaces: Spaces | None = None


@dataclass(slots=True, eq=False)
class _Reply:
    """What is told besides the columns; lanes are the process' own, from 0."""

    slot: Slot
    built: list[tuple[int, Any]] = field(default_factory=list)
    began: list[tuple[int, Any]] = field(default_factory=list)
    """Infos of resets that have any."""
    infos: list[tuple[int, Any]] = field(default_factory=list)
    failures: list[tuple[int, str, bool, Any]] = field(default_factory=list)
    pictures: list[tuple[int, Any]] = field(default_factory=list)

    def mark(self, lane: int, outcome: int) -> None:
        """Note an outcome, beside those that the lane has already."""
        self.slot.counts[0] += not self.slot.outcomes[lane]
        self.slot.outcomes[lane] |= outcome

    def fail(self, lane: int, at: str, error: BaseException, *, stepped: bool = False) -> None:
        self.failures.append((lane, at, stepped, error_to_json(error)))

    def write(self, socket: Sends) -> None:
        """Into the slot; what has no place there goes by the socket."""
        told = {name: value for name in self.__slots__[1:] if (value := getattr(self, name))}
        if not told:
            return
        body = orjson.dumps(told)
        self.slot.counts[1] = len(body)
        if len(body) <= len(self.slot.words):
            self.slot.words[: len(body)] = np.frombuffer(body, np.uint8)
        else:
            socket.send(body)


class ProcessEnvs:
    """`obey` does what an order says. Whatever a user's env raises or answers amiss is told, and ends nothing."""

    def __init__(self, job: ProcessJob, control: Control, build_env: BuildEnv) -> None:
        self._job = job
        self._build_env = build_env
        self._control = control
        self._seats = [_LaneEnv(index) for index in range(job.lanes)]
        self._all_step = bytes([Command.STEP] * job.lanes)
        self._rewards: NDArray[np.float64] | None = None

    def obey(self, slot: Slot, socket: Sends) -> None:
        """Do what each lane is commanded, and write the answer."""
        if slot.counts[0]:
            slot.outcomes[:] = 0
        slot.counts[0] = slot.counts[1] = 0
        answer = _Reply(slot)
        if slot.commands.tobytes() == self._all_step:
            self._step(self._seats, answer)
        else:
            self._obey_each(slot, answer)
        answer.write(socket)

    def _obey_each(self, slot: Slot, answer: _Reply) -> None:
        by_command: dict[int, list[_LaneEnv]] = {}
        for seat, command in zip(self._seats, slot.commands.tolist(), strict=True):
            by_command.setdefault(command, []).append(seat)
        for seat in by_command.get(Command.CLOSE, ()):
            self._close([seat])
        for command in (Command.BUILD, Command.REBUILD):
            for seat in by_command.get(command, ()):
                self._build(seat, answer, recreated=command is Command.REBUILD)
        if Command.RESET in by_command:
            self._reset(by_command[Command.RESET], answer)
        if Command.STEP in by_command:
            self._step(by_command[Command.STEP], answer)
        for seat in by_command.get(Command.RENDER, ()):
            with self._control.during(seat.index, Phase.RENDER):
                answer.pictures.append((seat.index, picture_to_json(seat.env, seat.index)))

    def close(self) -> None:
        """Close all envs, within one time limit for all of them."""
        self._close(self._seats)

    def _close(self, seats: Sequence[_LaneEnv]) -> None:
        envs = [seat.env for seat in seats]
        for seat in seats:
            seat.env = seat.step = None
        with self._control.during(seats[0].index if len(seats) == 1 else -1, Phase.CLOSE):
            close_envs(envs, self._job.close_timeout_s)

    def _build(self, seat: _LaneEnv, answer: _Reply, *, recreated: bool) -> None:
        job, seed = self._job, int(answer.slot.seeds[seat.index])
        context = EnvContext(
            job.env_config,
            worker_index=job.worker_index,
            num_workers=job.num_workers,
            vector_index=int(self._control.indices[seat.index]),
            num_envs=job.num_envs,
            recreated=recreated,
            seed=None if seed == NO_SEED else seed,
        )
        if seat.env is not None:
            self._close([seat])
        try:
            with self._control.during(seat.index, Phase.CONSTRUCTION):
                env, seat.spaces = self._build_env(find_creator(job.env), context, job.several_agents)
        except Exception as error:  # noqa: BLE001 - a user's env
            answer.fail(seat.index, "construction", error)
            return
        seat.env, seat.step = env, self._noted(seat.index, env.step)
        answer.built.append((seat.index, seat.spaces.model_dump(mode="json")))

    def _noted(self, lane: int, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        begin, end = self._control.begin, self._control.end

        def noted(action: Any) -> Any:
            begin(lane, Phase.STEP)
            try:
                return step(action)
            finally:
                end()

        return noted

    def _reset(self, seats: Sequence[_LaneEnv], answer: _Reply) -> None:
        if self._rewards is None:
            self._map(seats[0])
        done, values = [], []
        for seat, seed in zip(seats, answer.slot.seeds[[seat.index for seat in seats]].tolist(), strict=True):
            assert seat.env is not None, "the driver resets what was built"
            try:
                with self._control.during(seat.index, Phase.RESET):
                    observation, info = take_reset_apart(seat.env.reset(seed=seed))
                written = _info_json(info)
            except Exception as error:  # noqa: BLE001 - a user's env
                answer.fail(seat.index, "reset", error)
                continue
            done.append((seat.index, written))
            values.append(observation)
        problems = dict(self._first.put(np.array([index for index, _ in done], np.intp), values))
        for position, (index, written) in enumerate(done):
            if position in problems:
                answer.fail(index, "reset", problems[position])
            else:
                answer.mark(index, BEGAN)
                if written is not None:
                    answer.began.append((index, written))

    def _map(self, seat: _LaneEnv) -> None:
        """Map the columns. The driver has compared the spaces of the env that is reset first with those of all."""
        spaces, job = seat.spaces, self._job
        assert spaces is not None, "only an env that was built is reset"
        arrays = map_arrays(job.columns, columns_layout(spaces, job.width), create=False)
        mine = {name: column[job.first_lane : job.first_lane + job.lanes] for name, column in arrays.items()}
        seen = {name: column for name, column in mine.items() if name.partition("/")[0] == "obs"}
        first = {f"obs{name[5:]}": column for name, column in mine.items() if name.partition("/")[0] == "first"}
        check, space = job.check_bounds, spaces.observation
        self._observations = Observations(space, job.lanes, check_bounds=check, columns=seen)
        self._first = Observations(space, job.lanes, check_bounds=check, columns=first)
        self._actions = {name: column for name, column in mine.items() if name.partition("/")[0] == "actions"}
        self._action_space = spaces.action
        self._rewards = mine["rewards"]

    def _step(self, seats: Sequence[_LaneEnv], answer: _Reply) -> None:
        assert self._rewards is not None, "only an env that was reset is stepped"
        # Copied, for the driver writes the next ones there, and an env may keep what it was given.
        copied = {name: column.copy() for name, column in self._actions.items()}
        actions = to_env_form(self._action_space, copied)
        outcome = step_all(seats, actions, self._observations, len(self._seats))
        self._control.end()
        if len(seats) == len(self._seats):
            self._rewards[:] = outcome.rewards
        else:
            self._rewards[[seat.index for seat in seats]] = outcome.rewards
        for failure in outcome.failures:
            answer.fail(failure.lane, "step", failure.error, stepped=failure.stepped)
        spoilt = self._tell_infos(outcome.infos, answer) if outcome.infos else ()
        again = []
        for lane, end in outcome.ended:
            if lane not in spoilt:
                answer.mark(lane, end)
                if answer.slot.seeds[lane] != NO_SEED:
                    again.append(self._seats[lane])
        if again:
            self._reset(again, answer)

    def _tell_infos(self, infos: Sequence[tuple[int, dict[str, Any]]], answer: _Reply) -> set[int]:
        """The lanes whose info cannot be told, which is a failure of theirs."""
        spoilt = set()
        for lane, info in infos:
            try:
                answer.infos.append((lane, _info_json(info)))
            except EnvContractError as error:
                answer.fail(lane, "step", error, stepped=True)
                spoilt.add(lane)
        return spoilt


def _info_json(info: dict[str, Any]) -> orjson.Fragment | None:
    """An info as it would go on the wire; None is an empty one."""
    if not info:
        return None
    try:
        return orjson.Fragment(orjson.dumps(info, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS))
    except TypeError as error:
        expected = "plain values and arrays, as JSON can hold"
        raise EnvContractError("info", f"{brief(info)} ({error})", expected) from error
