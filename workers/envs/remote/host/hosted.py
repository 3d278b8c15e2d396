"""The envs of one life of a host. Each order is executed once. A repeated order gets the same answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.chunk import ChunkEnd
from headrace.schemas.chunks.info_json import MARK
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.chunks.task import Task
from headrace.schemas.errors import EncodeError, EnvContractError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, Buffer, MessageKind, encode, is_deeper, most_names
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.action_masks import masks_of
from headrace.workers.envs.backend import Replies
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.observations import Farthest
from headrace.workers.envs.process.control import Command, reset_seed
from headrace.workers.envs.process.error_json import error_to_json
from headrace.workers.envs.process.pool import EnvProcessPool
from headrace.workers.envs.process.shared_arrays import columns_layout
from headrace.workers.envs.remote.env_messages import NO_SEED, EnvAnswers, EnvHostWelcome, EnvOrders

_INFO_DEPTH = DEFAULT_LIMITS.header_depth - 3
"""Most levels of an info. An info lies three levels deep in the header."""


class PlacedPool(EnvProcessPool):
    """A pool whose lanes are built on order, each as a given env of the worker."""

    def __init__(self, config: EnvRunnerConfig, welcome: EnvHostWelcome) -> None:
        self._seeds: dict[int, int] = {}
        self._indices: dict[int, int] = {}
        super().__init__(
            config.model_copy(update={"infos": "none"}) if welcome.without_infos else config,
            welcome.worker_index,
            lambda lane, _: self._seeds[lane],
            num_workers=welcome.num_workers,
            num_envs=welcome.num_envs,
            several_agents=None,
        )

    def _build_all(self) -> None:
        """Do nothing: lanes are built on order."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `step_wait` has replies."""
        return self._processes.fileno()

    def build(self, lane: int, seed: int, index: int, *, again: bool) -> None:
        """Build the lane's env as the worker's env `index`. The reply is in `built`, or a failure.

        An env that moves later, or loses its process before it is built, is made with the same seed.
        """
        self._seeds[lane], self._indices[lane] = seed, index
        self._build(lane, Command.REBUILD if again else Command.BUILD)

    def _build(self, lane: int, command: Command) -> None:
        super()._build(lane, command)
        home = self._homes.home(lane)
        home.control.indices[lane - home.first_lane] = self._indices[lane]

    def index_of(self, lane: int) -> int:
        """Return the worker's index of this lane's env."""
        return self._indices.get(lane, lane)


@dataclass(slots=True, eq=False)
class _Place:
    """The last order of one place, and the answer to it without the arrays."""

    number: int = 0
    answered: bool = True
    told: dict[str, Any] = field(default_factory=dict)
    """Field of an `EnvAnswers` -> what it has of this place."""
    failures: list[Failure] = field(default_factory=list)
    lost: Failure | None = None
    """A failure while no order was under way: the answer to the next step or reset."""

    def begin(self, number: int) -> None:
        """Reset the record for another order."""
        self.number, self.answered, self.told, self.failures = number, False, {}, []

    def fail(self, failure: Failure) -> None:
        """Answer the order with a failure."""
        self.failures, self.lost, self.answered = [failure], None, True


class HostedEnvs:
    """`config.num_envs` places. Only `stop` blocks. Call `poll` when `fileno` is readable, and now and then."""

    def __init__(self, config: EnvRunnerConfig, life: str, welcome: EnvHostWelcome, spaces: Spaces) -> None:
        self._life = life
        self._places = [_Place() for _ in range(config.num_envs)]
        self._pool = PlacedPool(config, welcome)
        self._outside: list[tuple[int, Farthest]] = []
        """What the next answers tell of observations outside their Box."""
        self._pool.note_outside = lambda *noted: self._outside.append(noted)
        layout = columns_layout(spaces, config.num_envs).items()
        self._actions = {name: np.zeros(shape, dtype) for name, (dtype, shape) in layout if name.startswith("actions")}

    def fileno(self) -> int:
        """Return the descriptor of the pool."""
        return self._pool.fileno()

    @property
    def is_spare(self) -> bool:
        """Return whether the worker has sent no order to any env of this life."""
        return all(not own.number for own in self._places)

    def under_way(self) -> list[tuple[int, int]]:
        """Return (place, number) of each order that is not answered."""
        return [(place, own.number) for place, own in enumerate(self._places) if not own.answered]

    def obey(self, told: EnvOrders, arrays: Mapping[str, NDArray[Any]]) -> list[list[Buffer]]:
        """Execute new orders, and return the messages for orders that have an answer already."""
        tasks = dict(told.tasks)
        at_once: list[int] = []
        next_seeds: dict[int, int | None] = {}
        stepping: list[int] = []
        row = 0
        for place, number, code, seed, index in told.orders:
            command = Command(code)
            here, row = row, row + (command is Command.STEP)
            own = self._places[place]
            if number == own.number and own.answered:
                at_once.append(place)  # the worker did not get that answer
            if number <= own.number:
                continue
            own.begin(number)
            if command in (Command.STEP, Command.RESET) and own.lost is not None:
                own.fail(own.lost)
                at_once.append(place)
                continue
            if command in (Command.STEP, Command.RESET) and (tasks or self._pool.tasks):
                self._pool.tell_tasks({place: Task((0, 0), tasks[place]) if place in tasks else None})
            if command is Command.STEP:
                stepping.append(place)
                next_seeds |= {place: reset_seed(seed)} if seed != NO_SEED else {}
                for name, column in self._actions.items():
                    column[place] = arrays[name][here]
            elif command is Command.RESET:
                self._pool.reset(place, reset_seed(seed))
            else:
                own.lost = None
                self._pool.build(place, seed, index, again=command is Command.REBUILD)
        if stepping:
            self._pool.step_async(stepping, self._actions, next_seeds)
        return self._compose(at_once)

    def poll(self) -> list[list[Buffer]]:
        """Take in the envs' replies, and return the messages with the answers to orders."""
        replies = self._pool.step_wait(0.0)
        return self._compose(self._note(replies)) if replies else []

    def _note(self, replies: Replies) -> list[int]:
        """Note the answer of each place, and return the places that have one."""
        for name in ("stepped", "built", "also_truncated"):
            for lane in getattr(replies, name):
                self._places[lane].told[name] = lane
        ended = [(lane, 1 if end is ChunkEnd.TERMINATED else 2) for lane, end in replies.ended]
        began = [(lane, info or None) for lane, info in replies.began]
        for name, pairs in (("ended", ended), ("began", began), ("infos", replies.infos)):
            for lane, value in pairs:
                self._places[lane].told[name] = lane, value
        places = {*replies.stepped, *replies.built, *(lane for lane, _ in replies.began)}
        for failure in replies.failures:
            own = self._places[failure.lane]
            if own.answered and failure.lane not in places:
                own.lost = failure
            else:
                places.add(failure.lane)
                own.failures.append(failure)
        for place in places:
            self._places[place].answered = True
        return sorted(places)

    def _compose(self, places: Sequence[int]) -> list[list[Buffer]]:
        """Return one message, or several if it would be too large. One env's answer then goes without infos.

        If it is still too large, that env fails.
        """
        if not places:
            return []
        try:
            return [self._encode(places)]
        except EncodeError as error:
            if len(places) > 1:
                half = len(places) // 2
                return self._compose(places[:half]) + self._compose(places[half:])
            told = self._places[places[0]].told
            why = f"info ({error!s:.150})"
            shorter: dict[str, Any] = {
                name: (places[0], {MARK: [why], **masks_of(told[name][1])})
                for name in ("infos", "began")
                if name in told and told[name][1] and told[name][1].get(MARK) != [why]
            }
            if shorter:
                told |= shorter
                return self._compose(places)
            self._spoil(places[0], error)
            return [self._encode(places)]

    def _spoil(self, place: int, error: EncodeError) -> None:
        own = self._places[place]
        stepped = "stepped" in own.told
        at = "step" if stepped else "reset"
        told = EnvContractError(f"answer of {at}", str(error), "no larger than a message")
        failure = Failure(place, told, stepped=stepped, at=at)
        own.begin(own.number)
        own.fail(failure)

    def _encode(self, places: Sequence[int]) -> list[Buffer]:
        answers = [(place, self._places[place]) for place in places]
        told: dict[str, list[Any]] = {}
        for _, own in answers:
            for name, value in own.told.items():
                told.setdefault(name, []).append(value)
        header = EnvAnswers(
            life=self._life,
            answers=[(place, own.number) for place, own in answers],
            failures=[
                (place, failure.at, failure.stepped, self._tell(failure.error))
                for place, own in answers
                for failure in own.failures
            ],
            outside=self._outside,
            **told,
        )
        if any(is_deeper(info, _INFO_DEPTH) for _, info in (*header.infos, *header.began) if info):
            raise EncodeError(f"infos of ENV_ANSWERS are nested deeper than {_INFO_DEPTH} levels")
        rows = self._rows(header.stepped, [place for place, _ in header.began])
        size = sum(array.nbytes for array in rows.values())
        if size > DEFAULT_LIMITS.payload_bytes:
            raise EncodeError(f"arrays of ENV_ANSWERS have {size} bytes; {DEFAULT_LIMITS.payload_bytes} are allowed")
        frames = encode(MessageKind.ENV_ANSWERS, header.to_wire(), rows)
        if len(frames[1]) > DEFAULT_LIMITS.names:  # shorter headers have fewer names
            names = max((most_names(info) for _, info in (*header.infos, *header.began) if info), default=0)
            if names > DEFAULT_LIMITS.names:
                raise EncodeError(f"an info of ENV_ANSWERS has {names:,} names; {DEFAULT_LIMITS.names:,} are allowed")
        self._outside = []
        return frames

    def _tell(self, error: BaseException) -> dict[str, Any]:
        """Return the error as JSON, with the worker's indices of envs."""
        told = error_to_json(error)
        for fact in ("env_index", "culprit"):
            if fact in told:
                told[fact] = self._pool.index_of(told[fact])
        return told

    def _rows(self, stepped: list[int], began: list[int]) -> dict[str, NDArray[Any]]:
        """Return the observations and rewards of these places. The pool keeps them until the places' next order."""
        rows: dict[str, NDArray[Any]] = {}
        if stepped:
            rows["rewards"] = self._pool.rewards[stepped]
            rows |= {name: column[stepped] for name, column in self._pool.observations.items()}
        if began:
            rows |= {f"first{name[3:]}": column[began] for name, column in self._pool.first.items()}
        return rows

    def stop(self) -> None:
        """Close all envs, within 5 s."""
        self._pool.close()
