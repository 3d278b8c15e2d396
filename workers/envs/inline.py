"""Envs that are objects of this process: built, stepped one after the other, and replaced where they fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from headrace.schemas.accounts.user_calls import UserCall
from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import ConfigError, EnvContractError
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.envs.actions import action_root, to_env_form
from headrace.workers.envs.backend import EnvBackend, NextSeeds, Replies
from headrace.workers.envs.checks import take_reset_apart
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.creators import EnvCreator, build_env, find_creator, naming_what_failed
from headrace.workers.envs.failures import Failure
from headrace.workers.envs.lane import EnvSlot, close_envs
from headrace.workers.envs.lane_table import LaneTable
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.ownership import free
from headrace.workers.envs.rendering import render_at
from headrace.workers.envs.sequential_step import Outcome, step_all
from headrace.workers.envs.spaces import spaces_of
from headrace.workers.envs.task_reset import reset_with

if TYPE_CHECKING:
    from headrace.workers.envs.vector_env import UserVectorEnvs


class EnvKind(Protocol):
    """The kind of env that a vector has: builds envs, and checks that all of them have the same spaces."""

    def make_env(self, creator: EnvCreator, context: EnvContext) -> Any:
        """Return one env. Raises `EnvContractError` for another kind, and the creator's own errors."""

    def learn_spaces(self, first: Any) -> None:
        """Use the spaces of env 0 for all envs."""

    def check_spaces(self, env: Any, index: int) -> None:
        """Raise `EnvContractError` unless env `index` has the spaces of env 0."""


class BuiltEnvs:
    """One env of `kind` for each lane of `table`, in `slots`.

    `first` is an env 0 that was built already, with the context in the table. Errors of the kind are raised as an
    `EnvError` that names the env, after all envs are closed.
    """

    def __init__(self, table: LaneTable, kind: EnvKind, first: Any = None) -> None:
        self.slots = [EnvSlot(lane.index) for lane in table.lanes]
        self._table = table
        self._kind = kind
        self._creator = find_creator(table.config.env)
        try:
            self._build(first)
        except BaseException:
            self.close()
            raise

    def _build(self, first: Any) -> None:
        table, creators = self._table, [self._creator] * len(self.slots)
        if first is not None:
            creators[0] = lambda _: first
        contexts = [
            table.contexts[0] if slot.index == 0 and first is not None else table.new_context(slot.index)
            for slot in self.slots
        ]
        for slot, creator, context in zip(self.slots, creators, contexts, strict=True):
            with naming_what_failed(table.config, slot.index), table.totals.calls.of(UserCall.CONSTRUCTION, slot.index):
                slot.adopt(self._kind.make_env(creator, context))
        self._kind.learn_spaces(self.slots[0].env)
        for slot in self.slots[1:]:
            self._kind.check_spaces(slot.env, slot.index)

    def rebuild(self, index: int) -> None:
        """Build the env of lane `index` again. Raises what the creator raises, and `EnvContractError`."""
        slot = self.slots[index]
        free(self._table.contexts[index].life)
        with self._table.totals.calls.of(UserCall.CONSTRUCTION, index):
            slot.adopt(self._kind.make_env(self._creator, self._table.new_context(index, recreated=True)))
        self._kind.check_spaces(slot.env, index)

    def close_env(self, index: int) -> None:
        """Close the env of lane `index`, within 5 s."""
        close_envs([self.slots[index].release()])

    def close(self) -> None:
        """Close all envs, within one time limit for all of them."""
        self._table.disown()
        close_envs([slot.release() for slot in self.slots])


class InlineEnvs(EnvBackend):
    """Envs that are objects of this process: those of a user's `vector`, or one from each call of the creator.

    `first`, if given, is env 0, which was built to find out its kind. `step_wait` has the replies to all calls but
    steps.
    """

    replies_at_once = True
    resets_ahead = False

    def __init__(self, table: LaneTable, vector: UserVectorEnvs | None = None, first: Any = None) -> None:
        self.width = len(table.lanes)
        self._table, self._calls = table, table.totals.calls
        self._vector = vector
        self.tasks = {}
        self._tell = table.tell if table.config.infos == "all" else None
        self._asked: Sequence[EnvSlot] = ()
        """Slots that are to step."""
        self._reset: list[tuple[int, dict[str, Any]]] = []
        """(lane, info) of resets, with their observations, that `step_wait` has not told yet."""
        self._first_seen: list[Any] = []
        self._told = Replies()
        """Replies of `step_wait` that belong to no step and no reset."""
        try:
            self._envs = BuiltEnvs(table, self, first)
        except BaseException:
            if vector is not None:
                vector.close()
            raise

    # -- as an `EnvKind` ----------------------------------------------------------------------------------------------

    def make_env(self, creator: EnvCreator, context: EnvContext) -> gym.Env[Any, Any]:
        """Return one env, as `EnvKind` does."""
        return build_env(creator, context) if self._vector is None else self._vector.make_env(creator, context)

    def learn_spaces(self, first: gym.Env[Any, Any]) -> None:
        """Use the spaces of env 0 for all envs."""
        self.spaces = spaces_of(first)
        self.gym_spaces = first.observation_space, first.action_space
        self._seen = Observations(self.spaces.observation, self.width, note_outside=self._table.note_outside)
        self.observations = self._seen.columns

    def check_spaces(self, env: gym.Env[Any, Any], index: int) -> None:
        """Raise `EnvContractError` unless env `index` has the spaces of env 0."""
        spaces = spaces_of(env)
        if spaces != self.spaces:
            raise EnvContractError(f"spaces of env {index}", repr(spaces), f"those of env 0, {self.spaces!r}")

    # -- as an `EnvBackend` -------------------------------------------------------------------------------------------

    def env_at(self, lane: int) -> Any:
        return self._envs.slots[lane].env

    def step_async(
        self, lanes: Sequence[int] | None, columns: Mapping[str, NDArray[Any]], next_seeds: NextSeeds | None = None
    ) -> None:
        """Set the actions of `lanes` (None: all) for the next `step`. There are no `next_seeds`."""
        slots = self._envs.slots
        self._asked = slots if lanes is None else [slots[lane] for lane in lanes]
        self._actions = to_env_form(self.spaces.action, columns, action_root(columns))

    def step(self) -> Outcome:
        """Step the envs that have actions. Takes as long as they do."""
        asked, self._asked = self._asked, ()
        if self._vector is not None:
            with self._calls.of(UserCall.STEP, -self.width):
                self._vector.before_step(asked, self._actions)
        return step_all(asked, self._actions, self._seen, self.width, self._tell, self._calls)

    def step_wait(self, timeout_s: float = 0.0, batch_wait_s: float = 0.0) -> Replies:
        """Return the replies to all calls but steps, without waiting."""
        replies, self._told = self._told, Replies()
        if self._reset:
            self._show_first(replies)
        return replies

    def reset(self, lane: int, seed: int | None) -> None:
        """Reset the lane's env now."""
        try:
            with self._calls.of(UserCall.RESET, lane):
                answer = reset_with(self._envs.slots[lane].env, seed, self.tasks.get(lane))
            observation, info = take_reset_apart(answer)
            if info and self._tell is not None:
                info = self._tell(info)
        except BaseException as error:  # noqa: BLE001 - a user's env
            raise_stop(error)
            self._told.failures.append(Failure(lane, error))
            return
        self._reset.append((lane, info))
        self._first_seen.append(observation)

    def _show_first(self, replies: Replies) -> None:
        """Write all first observations together, which costs less than one by one."""
        reset, self._reset = self._reset, []
        seen, self._first_seen = self._first_seen, []
        problems = dict(self._seen.put(np.array([lane for lane, _ in reset], np.intp), seen))
        for position, (lane, info) in enumerate(reset):
            if position in problems:
                replies.failures.append(Failure(lane, problems[position]))
            else:
                replies.began.append((lane, info))

    def rebuild(self, lane: int) -> None:
        """Build the lane's env again now."""
        try:
            self._envs.rebuild(lane)
        except BaseException as error:  # noqa: BLE001 - a user's env
            raise_stop(error)
            self._told.failures.append(Failure(lane, error, at="construction"))
            return
        self._told.built.append(lane)

    def close_env(self, lane: int) -> None:
        """Close the lane's env, within 5 s."""
        self._envs.close_env(lane)

    def render(self, lane: int) -> None:
        with self._calls.of(UserCall.RENDER, lane):
            self._told.pictures.append((lane, render_at(self.env_at(lane), lane)))

    def close(self) -> None:
        self._envs.close()
        if self._vector is not None:
            self._vector.close()


def check_inline(config: EnvRunnerConfig) -> None:
    """Raise `ConfigError` for a config of envs that cannot run in this process.

    Raises the errors of `find_creator` too.
    """
    for key, here, whose in (
        ("gym_env_vectorize_mode", None, "a SingleAgentEnvRunner"),
        ("env_placement", "inline", "a runner"),
    ):
        if (asked := getattr(config, key)) != here:
            raise ConfigError(f"{asked!r} is for {whose} that had it from the beginning", key=key)
    find_creator(config.env)
