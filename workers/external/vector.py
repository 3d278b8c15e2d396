"""External episodes of one agent, as the lanes of a sampler: each with an observation acts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Spaces, leaves
from headrace.schemas.errors import EnvContractError
from headrace.workers.envs.actions import action_root, to_env_form
from headrace.workers.envs.observations import Observations
from headrace.workers.envs.sequential_step import Outcome
from headrace.workers.envs.spaces import spaces_of
from headrace.workers.external.calls import Answer, Call, Row, SoloCall
from headrace.workers.external.env import ExternalEnv
from headrace.workers.external.lanes import ExternalLanes
from headrace.workers.external.solo_episodes import ExternalEpisodes


class ExternalVector(ExternalLanes):
    """The lanes of an `ExternalEnv`: an `EnvDriver`, and an `ExternalDriver`."""

    episodes: ExternalEpisodes
    _env_kind, _made = ExternalEnv, "action_space"

    def _learn_spaces(self, env: Any) -> None:
        self.spaces: Spaces = spaces_of(env)
        self.gym_spaces = env.observation_space, env.action_space
        roots = ("actions", "actions_for_env")
        self._action_names = {root: [name for name, _ in leaves(self.spaces.action, root)] for root in roots}
        self.observations = Observations(self.spaces.observation, len(self.lanes))

    def _check_spaces(self, env: Any) -> None:
        spaces = spaces_of(env)
        if spaces != self.spaces:
            raise EnvContractError("spaces of the env", repr(spaces), f"those it had before, {self.spaces!r}")

    def _new_table(self) -> ExternalEpisodes:
        return ExternalEpisodes(
            self.spaces,
            len(self.lanes),
            self._table.tell,
            note_outside=self._table.note_outside,
            takes_logged=not self._table.config.module_to_env,
        )

    # -- acting -------------------------------------------------------------------------------------------------------

    def send_actions(self, columns: dict[str, NDArray[Any]], lanes: NDArray[np.intp] | None = None) -> None:
        """Send `lanes` (None: all that ask) their actions, from the rows of the policy's columns.

        The answers are sent when this returns.
        """
        lanes = self.asking if lanes is None else lanes
        root = action_root(columns)
        rows = {name: columns[name][lanes] for name in self._action_names[root]}
        actions, version = to_env_form(self.spaces.action, rows, root), self.read_version()
        acting, places = lanes.tolist(), self._places
        self._under_way.update(acting)
        told = zip(acting, actions, strict=True)
        self.episodes.answer([(places[lane], Answer(action, version)) for lane, action in told])
        self.episodes.deliver()

    def logged(self, lanes: NDArray[np.intp]) -> dict[int, Row]:
        """Return the logged actions by lane, of those `lanes` whose driver logged one."""
        done = {}
        for lane in lanes.tolist():
            call = self._places[lane].call
            if isinstance(call, SoloCall) and call.logged is not None:
                done[lane] = call.logged
        return done

    # -- taking in ----------------------------------------------------------------------------------------------------

    def _see_first(self, call: Call) -> None:
        self._show(call)

    def _hear(self, call: Call, outcome: Outcome) -> float:
        if call.info:
            outcome.infos.append((call.place.lane, call.info))
        return self._show(call).reward

    def _show(self, call: Call) -> SoloCall:
        assert isinstance(call, SoloCall), "its table makes no other"
        columns, lane = self.observations.columns, call.place.lane
        for name, value in call.row.items():
            columns[name][lane] = value
        return call
