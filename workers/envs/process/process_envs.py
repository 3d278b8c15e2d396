"""The envs of one process, which builds, resets and steps them as its driver orders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.spaces import Spaces
from headrace.workers.envs.action_masks import masks_of
from headrace.workers.envs.actions import to_env_form
from headrace.workers.envs.checks import take_reset_apart, told_info
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator, build_env, find_creator
from headrace.workers.envs.failures import let_go
from headrace.workers.envs.lane import close_envs
from headrace.workers.envs.observations import Farthest, Observations
from headrace.workers.envs.ownership import free
from headrace.workers.envs.process.channel import ProcessEnd
from headrace.workers.envs.process.control import (
    ALSO_TRUNCATED,
    BEGAN,
    NO_SEED,
    Command,
    Control,
    Phase,
    Slot,
    reset_seed,
)
from headrace.workers.envs.process.error_json import error_to_json
from headrace.workers.envs.process.shared_arrays import columns_layout, map_arrays
from headrace.workers.envs.rendering import picture_to_json
from headrace.workers.envs.sequential_step import step_all
from headrace.workers.envs.spaces import spaces_of
from headrace.workers.envs.task_reset import reset_with

BuildEnv = Callable[[EnvCreator, EnvContext, bool | None], tuple[Any, Spaces]]
"""(creator, context, whether the env must be of several agents; None: either) -> an env in columns, and its spaces."""


def build_solo_env(creator: EnvCreator, context: EnvContext, several_agents: bool | None) -> tuple[Any, Spaces]:
    """Return one env of one agent, and its spaces: a `BuildEnv` for single-agent envs only."""
    env = build_env(creator, context)
    return env, spaces_of(env)


class ProcessJob(BaseModel):
    """The settings that a process gets at its start. The process inherits the descriptors."""

    env: str
    env_config: dict[str, Any]
    worker_index: int
    num_workers: int
    num_envs: int
    """Number of envs of the runner. Creators of envs get it, like the two numbers above."""
    first_lane: int
    """The first of the process' lanes, which are consecutive."""
    lanes: int
    width: int
    """Number of lanes in the whole pool, which is the number of rows of each column."""
    keeps_infos: bool
    """False: of infos only masks of actions are sent."""
    strict_bounds: bool
    several_agents: bool | None
    """Argument of `BuildEnv`: True for multi-agent envs, which are packed, False for others; None: either kind."""
    close_timeout_s: float
    import_path: list[str]
    """`sys.path` of the driver."""
    bell: int
    told: int
    replies: int
    latch_tokens: int
    latch_bell: int
    control: int
    columns: int
    lifeline: int
    last_words: int
    """Descriptor that gets the Python stack in a crash, or when the driver asks for it."""

    @property
    def descriptors(self) -> list[int]:
        """All descriptors that the process inherits."""
        bells = [self.bell, self.told, self.latch_tokens, self.latch_bell]
        return [*bells, self.replies, self.control, self.columns, self.lifeline, self.last_words]


@dataclass(slots=True, eq=False)
class _LaneEnv:
    index: int
    env: gym.Env[Any, Any] | None = None
    step: Callable[[Any], Any] | None = None
    spaces: Spaces | None = None
    context: EnvContext | None = None
    """The context that owns the env."""
    task: dict[str, Any] | None = None
    """The values for its resets."""


@dataclass(slots=True, eq=False)
class _Reply:
    """The part of a reply that is not in the columns. Lanes are the process' own, from 0."""

    slot: Slot
    built: list[tuple[int, Any]] = field(default_factory=list)
    began: list[tuple[int, Any]] = field(default_factory=list)
    """Infos of resets that are not empty."""
    infos: list[tuple[int, Any]] = field(default_factory=list)
    failures: list[tuple[int, str, bool, Any]] = field(default_factory=list)
    pictures: list[tuple[int, Any]] = field(default_factory=list)
    outside: list[tuple[int, Farthest]] = field(default_factory=list)
    """What `note_outside` of a pool is told."""

    def mark(self, lane: int, outcome: int) -> None:
        """Add an outcome to the lane's outcomes."""
        self.slot.counts[0] += not self.slot.outcomes[lane]
        self.slot.outcomes[lane] |= outcome

    def fail(self, lane: int, at: str, error: BaseException, *, stepped: bool = False) -> None:
        self.failures.append((lane, at, stepped, error_to_json(error)))
        let_go(error)

    def write(self, channel: ProcessEnd) -> None:
        """Write the reply into the slot, or into the file of long replies if it does not fit."""
        told = {name: value for name in self.__slots__[1:] if (value := getattr(self, name))}
        if not told:
            return
        body = orjson.dumps(told)
        self.slot.counts[1] = len(body)
        if len(body) <= len(self.slot.words):
            self.slot.words[: len(body)] = np.frombuffer(body, np.uint8)
        else:
            channel.send(self.slot.index, body)


class ProcessEnvs:
    """The envs of one process. `obey` executes an order, and reports all failures of the user's envs."""

    def __init__(self, job: ProcessJob, control: Control, build_env: BuildEnv) -> None:
        self._job = job
        self._build_env = build_env
        self._control = control
        self._places = [_LaneEnv(index) for index in range(job.lanes)]
        self._all_step = bytes([Command.STEP] * job.lanes)
        self._rewards: NDArray[np.float64] | None = None
        self._tell = _info_json if job.keeps_infos else _masks_json
        self._outside: list[tuple[int, Farthest]] = []

    def obey(self, slot: Slot, channel: ProcessEnd) -> None:
        """Execute each lane's command, and write the reply."""
        if slot.counts[0]:
            slot.outcomes[:] = 0
        for lane, values in orjson.loads(slot.tasks[: slot.counts[2]].tobytes()) if slot.counts[2] else ():
            self._places[lane].task = values
        slot.counts[0] = slot.counts[1] = slot.counts[2] = 0
        reply = _Reply(slot)
        if slot.commands.tobytes() == self._all_step:
            self._step(self._places, reply)
        else:
            self._obey_each(slot, reply)
        reply.outside, self._outside = self._outside, []
        reply.write(channel)

    def _obey_each(self, slot: Slot, reply: _Reply) -> None:
        by_command: dict[int, list[_LaneEnv]] = {}
        for place, command in zip(self._places, slot.commands.tolist(), strict=True):
            by_command.setdefault(command, []).append(place)
        for place in by_command.get(Command.CLOSE, ()):
            self._close([place])
        for command in (Command.BUILD, Command.REBUILD):
            for place in by_command.get(command, ()):
                self._build(place, reply, recreated=command is Command.REBUILD)
        if Command.RESET in by_command:
            self._reset(by_command[Command.RESET], reply)
        if Command.STEP in by_command:
            self._step(by_command[Command.STEP], reply)
        for place in by_command.get(Command.RENDER, ()):
            with self._control.during(place.index, Phase.RENDER):
                reply.pictures.append((place.index, picture_to_json(place.env, place.index)))

    def close(self) -> None:
        """Close all envs, within one time limit for all of them."""
        self._close(self._places)

    def _close(self, places: Sequence[_LaneEnv]) -> None:
        envs = [place.env for place in places]
        for place in places:
            place.env = place.step = None
        with self._control.during(places[0].index if len(places) == 1 else -1, Phase.CLOSE):
            close_envs(envs, self._job.close_timeout_s)

    def _build(self, place: _LaneEnv, reply: _Reply, *, recreated: bool) -> None:
        job, seed, old = self._job, int(reply.slot.seeds[place.index]), place.context
        context = place.context = EnvContext(
            job.env_config,
            worker_index=job.worker_index,
            num_workers=job.num_workers,
            vector_index=int(self._control.indices[place.index]),
            num_envs=job.num_envs,
            recreated=recreated,
            seed=None if seed == NO_SEED else seed,
        )
        if place.env is not None:
            self._close([place])
        if old is not None:
            free(old.life)
        try:
            with self._control.during(place.index, Phase.CONSTRUCTION):
                env, place.spaces = self._build_env(find_creator(job.env), context, job.several_agents)
        except BaseException as error:  # noqa: BLE001 - a user's env
            raise_stop(error)
            reply.fail(place.index, "construction", error)
            return
        place.env, place.step = env, self._noted(place.index, env.step)
        reply.built.append((place.index, place.spaces.model_dump(mode="json")))

    def _noted(self, lane: int, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        begin, end = self._control.begin, self._control.end

        def noted(action: Any) -> Any:
            begin(lane, Phase.STEP)
            try:
                return step(action)
            finally:
                end()

        return noted

    def _reset(self, places: Sequence[_LaneEnv], reply: _Reply) -> None:
        if self._rewards is None:
            self._map(places[0])
        done, values = [], []
        for place, seed in zip(places, reply.slot.seeds[[place.index for place in places]].tolist(), strict=True):
            assert place.env is not None, "the driver resets what was built"
            try:
                with self._control.during(place.index, Phase.RESET):
                    observation, info = take_reset_apart(reset_with(place.env, reset_seed(seed), place.task))
                written = self._tell(info) if info else None
            except BaseException as error:  # noqa: BLE001 - a user's env
                raise_stop(error)
                reply.fail(place.index, "reset", error)
                continue
            done.append((place.index, written))
            values.append(observation)
        problems = dict(self._first.put(np.array([index for index, _ in done], np.intp), values))
        for position, (index, written) in enumerate(done):
            if position in problems:
                reply.fail(index, "reset", problems[position])
            else:
                reply.mark(index, BEGAN)
                if written is not None:
                    reply.began.append((index, written))

    def _map(self, place: _LaneEnv) -> None:
        """Map the columns, by the spaces of the first env that is reset. The driver has compared all envs' spaces."""
        spaces, job = place.spaces, self._job
        assert spaces is not None, "only an env that was built is reset"
        arrays = map_arrays(job.columns, columns_layout(spaces, job.width), create=False)
        mine = {name: column[job.first_lane : job.first_lane + job.lanes] for name, column in arrays.items()}
        seen = {name: column for name, column in mine.items() if name.partition("/")[0] == "obs"}
        first = {f"obs{name[5:]}": column for name, column in mine.items() if name.partition("/")[0] == "first"}
        space, note = spaces.observation, None if job.strict_bounds else self._note_outside
        self._observations = Observations(space, job.lanes, note_outside=note, columns=seen)
        self._first = Observations(space, job.lanes, note_outside=note, columns=first)
        self._actions = {name: column for name, column in mine.items() if name.partition("/")[0] == "actions"}
        self._action_space = spaces.action
        self._rewards = mine["rewards"]

    def _note_outside(self, observations: int, farthest: Farthest) -> None:
        self._outside.append((observations, farthest))

    def _step(self, places: Sequence[_LaneEnv], reply: _Reply) -> None:
        assert self._rewards is not None, "only an env that was reset is stepped"
        # Copied, because the driver writes the next actions there, and an env may keep what it was given.
        copied = {name: column.copy() for name, column in self._actions.items()}
        actions = to_env_form(self._action_space, copied)
        outcome = step_all(places, actions, self._observations, len(self._places), self._tell)
        self._control.end()
        if len(places) == len(self._places):
            self._rewards[:] = outcome.rewards
        else:
            self._rewards[[place.index for place in places]] = outcome.rewards
        for failure in outcome.failures:
            reply.fail(failure.lane, "step", failure.error, stepped=failure.stepped)
        reply.infos = [told for told in outcome.infos if told[1] is not None]
        again = []
        for lane, end in outcome.ended:
            reply.mark(lane, end)
            if reply.slot.seeds[lane] != NO_SEED:
                again.append(self._places[lane])
        for lane in outcome.also_truncated:
            reply.mark(lane, ALSO_TRUNCATED)
        if again:
            self._reset(again, reply)


def _info_json(info: dict[str, Any]) -> orjson.Fragment:
    """Return an info as JSON. Raises `EnvContractError` unless it is a dict."""
    return orjson.Fragment(told_info(info))


def _masks_json(info: dict[str, Any]) -> orjson.Fragment | None:
    """Return the masks in an info, or in those of several agents, as JSON. None without masks."""
    own = masks_of(info)
    return _info_json(own) if own else None
