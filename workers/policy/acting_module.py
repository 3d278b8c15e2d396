"""One module with its connectors, memory and random numbers: it chooses the actions of all its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.chunks.module_spaces import DEFAULT_MODULE_ID
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ConfigError, EnvContractError, ModuleError
from headrace.workers.connectors.connector import State
from headrace.workers.connectors.vector_connectors import VectorConnectors
from headrace.workers.envs.action_masks import ActionMask, choices_of, find_mask
from headrace.workers.envs.actions import action_root
from headrace.workers.policy.acting import Actor, BlockActor, Columns
from headrace.workers.policy.acting_device import ActingDevice, LaneMemory
from headrace.workers.policy.action_chunks import ActionChunks, make_actor
from headrace.workers.policy.masks import LegalRandomActions
from headrace.workers.policy.module_protocol import SplitAct
from headrace.workers.policy.module_weights import check_weights, read_weights, write_weights
from headrace.workers.policy.noise import ActionNoise


class ActingModule:
    """Chooses actions for rows. A row is an env of one agent, or one agent's seat in one env.

    `env_spaces` are the rows' own, before connectors. Without a `module` only random actions can be chosen. Every
    forward pass covers all rows, even those that do not act, because rounding depends on the number of rows. With
    `blocks`, each block of rows is one pass.

    Random actions are of the module's action space, and reach the env by the same way as the policy's. So the columns
    "actions" and "actions_for_env" mean the same in all chunks.
    """

    def __init__(
        self,
        module_id: str,
        env_spaces: Spaces,
        connectors: VectorConnectors,
        noise: ActionNoise,
        blocks: Sequence[NDArray[np.intp]] = (),
    ) -> None:
        self.module_id = module_id
        self.env_spaces = env_spaces
        self.connectors = connectors
        self.noise = noise
        self.module: torch.nn.Module | None = None
        self.random = LegalRandomActions(env_spaces, connectors.spaces.action, connectors.observed)
        self.mask: ActionMask | None = None
        """The mask that the module obeys, in its own observations."""
        self._blocks = blocks
        self._actor: Actor | BlockActor | ActionChunks | None = None
        self._device: ActingDevice | None = None
        self._maps: bool | None = None
        """True if the module maps its actions itself; None: not known yet."""
        noise.begin("random_actions", self.random.noise_size, "uniform")

    @property
    def spaces(self) -> Spaces:
        """The spaces of the module and its chunks: the rows' own after all connectors."""
        return self.connectors.spaces

    @property
    def memory(self) -> LaneMemory | None:
        """The state of a recurrent module, by row; None for other modules."""
        return self._actor.memory if self._actor is not None else None

    @property
    def remembers(self) -> bool:
        """Return whether an action may depend on earlier observations: by a memory, or as a step of an action chunk."""
        return self.memory is not None or isinstance(self._actor, ActionChunks)

    @property
    def width(self) -> int:
        """Number of rows."""
        return len(next(iter(self.connectors.columns.values())))

    def use(self, module: Any, count_steps: Callable[[], int], device: ActingDevice | None = None) -> None:
        """Act with `module` from now on; with None only random actions. `count_steps` returns the fleet's steps so far.

        The module is moved to `device` (None: it stays on the CPU). A recurrent module begins with an empty memory.
        Raises `ModuleError` for a bad initial state, and `ConfigError` where a module that obeys action masks would not
        see the env's.
        """
        self.module = self._actor = self._maps = self.mask = None
        self.noise.forget("policy")
        if module is None:
            return
        self._count_steps, self._device = count_steps, device
        if getattr(module, "obeys_action_mask", False):
            self.mask = self._visible_mask()
        self._actor = self._make_actor(module)
        self.module = module
        self.noise.begin("policy", module.noise_size, module.noise_kind)

    def _visible_mask(self) -> ActionMask | None:
        """Return the mask in the module's observations. Raises `ConfigError` if connectors have removed the env's."""
        mask, sent = ActionMask.of(self.spaces), find_mask(self.env_spaces.observation)
        if mask is None and sent is not None and choices_of(self.spaces.action) == choices_of(self.env_spaces.action):
            raise ConfigError(
                f"a connector removes the action mask {sent[0]!r}, so module {self.module_id!r} cannot obey it; return "
                "it with the other observations, or remove it in the env",
                key="env_to_module",
            )
        return mask

    def faults(self, rows: NDArray[np.intp], *, random_actions: bool) -> list[tuple[int, EnvContractError]]:
        """Return (position in `rows`, error) for each row that cannot act, because its mask is unsound or all 0."""
        if random_actions:
            return self.random.faults(rows)
        if self.mask is None:
            return []
        faults = self.mask.faults(self.connectors.columns, rows)
        if not self.connectors.sees:
            return faults
        return [(at, EnvContractError(f"{e.what} after env_to_module", e.seen, e.expected)) for at, e in faults]

    def widen(self) -> None:
        """Act for the connectors' new rows too. Earlier rows keep their memory."""
        self.random.follow(self.connectors.observed)
        before, memory = self._actor, self.memory
        if self.module is None:
            return
        self._actor = self._make_actor(self.module)
        if memory is not None and self.memory is not None:
            self.memory.follow(memory)
        if isinstance(before, ActionChunks) and isinstance(self._actor, ActionChunks):
            self._actor.follow(before)

    def _make_actor(self, module: Any) -> Actor | BlockActor | ActionChunks:
        columns, count_steps = self.connectors.columns, self._count_steps
        return make_actor(module, self.spaces, columns, count_steps, self._blocks, self._device)

    @property
    def split(self) -> SplitAct | None:
        """The module's function that makes columns in two parts; None where it makes all of them at each step."""
        return self._actor.split if self._actor is not None else None

    def act(
        self,
        acting: NDArray[np.intp] | None,
        *,
        explore: bool,
        random_actions: bool,
        whole: bool = True,
        weights_seq: int = 0,
    ) -> Columns:
        """Return columns with one entry for each row. Only the entries of `acting` (None: all) are valid.

        Without `whole`, return what `split` chooses; its `complete` makes the other columns. `weights_seq` numbers the
        weights in use. A column of that name is among those of a module that makes action chunks. Raises `ModuleError`
        when the module fails, `ConnectorError` when a connector does.
        """
        some = None if acting is None or len(acting) == self.width else acting
        if some is not None and self.mask is not None and not type(self.module).__module__.startswith("headrace."):
            self.mask.lift(self.connectors.columns, some)
        if random_actions:
            drawn = self._draw(acting)
            self.random.drop(acting)
            self.drop_chosen(acting)
            return self.connectors.for_env(drawn, some)
        self.random.drop(acting)
        assert self._actor is not None, "the runner asks whether there is a module before it samples"
        try:
            noise = self.noise.draw("policy", acting) if explore else None
            if isinstance(self._actor, ActionChunks):
                columns = self._actor(noise, some, weights_seq, in_step=self.noise.in_step)
            else:
                columns = self._actor(noise, some, whole=whole)
        except ModuleError as error:
            if self.module_id not in ("", DEFAULT_MODULE_ID):
                error.args = (f"module {self.module_id!r}: {error}",)
            raise
        return self.connectors.for_env(columns, some)

    def _draw(self, acting: NDArray[np.intp] | None) -> Columns:
        """Return random actions, and the module's own actions for them if the module maps its actions to the env's."""
        drawn = self.random(self.noise.draw("random_actions", acting))
        if not self._module_maps(acting):
            return drawn
        policy_actions = getattr(self.module, "policy_actions", dict)
        sent = {"actions_for_env" + name.removeprefix("actions"): rows for name, rows in drawn.items()}
        return {**policy_actions(drawn), **sent}

    def _module_maps(self, acting: NDArray[np.intp] | None) -> bool:
        """Return whether the module returns "actions_for_env". Takes one forward pass and drops its result."""
        module: Any = self.module
        if self._maps is None and module is not None:
            actor = Actor(module, self.spaces, self.connectors.columns, lambda: 0, device=self._device)
            columns = actor(np.zeros((self.width, module.noise_size), np.float32), acting)
            self._maps = action_root(columns) == "actions_for_env"
        return bool(self._maps)

    def start(self, rows: Sequence[int] | NDArray[np.intp]) -> None:
        """Begin an episode in each of `rows`, whose first observation has arrived. Raises `ConnectorError`."""
        self.random.drop(np.asarray(rows, np.intp))
        self.connectors.started(rows)
        if self.memory is not None:
            self.memory.reset(rows)
        self.drop_chosen(np.asarray(rows, np.intp))

    def drop_chosen(self, rows: NDArray[np.intp] | None) -> None:
        """Drop the actions that were chosen for later steps of `rows` (None: all)."""
        if isinstance(self._actor, ActionChunks):
            self._actor.drop(rows)

    def state_in(self, row: int, *, pending: bool) -> dict[str, NDArray[Any]]:
        """Return the row's memory before its next step; with `pending`, before the action that was already chosen."""
        return {} if self.memory is None else self.memory.of(row, before=pending)

    # -- weights and connector state ----------------------------------------------------------------------------------

    def read_weights(self) -> dict[str, NDArray[Any]] | None:
        """Return copies of the module's weights by name; None without a module."""
        return None if self.module is None else read_weights(self.module)

    def check(self, weights: Mapping[str, NDArray[Any]] | None, states: Mapping[str, State]) -> None:
        """Raise `ModuleError` or `ConnectorError` unless `write` can take these; None leaves the weights."""
        if weights is not None:
            if self.module is None:
                raise ModuleError(f"the builder of module {self.module_id!r} gave none, so it cannot take weights")
            check_weights(self.module, weights)
        self.connectors.check_state(states)

    def write(self, weights: Mapping[str, NDArray[Any]] | None, states: Mapping[str, State]) -> None:
        """Write weights and states that `check` has accepted."""
        self.connectors.set_state(states)
        if weights is not None and self.module is not None:
            write = write_weights if self._device is None else self._device.write_weights
            write(self.module, weights)

    def take_connectors_of(self, earlier: ActingModule) -> None:
        """Take over the state of the connectors of `earlier`, if it fits."""
        known = earlier.connectors.get_state()
        if self.connectors.fits(known):
            self.connectors.set_state(known)
