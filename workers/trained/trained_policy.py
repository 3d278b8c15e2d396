"""A trained policy for use in other programs: observations in, actions in the env's units out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.chunks.spaces import Dict, Space, Spaces, Tuple, column_dtype, leaf_shape, leaves, nest
from headrace.schemas.errors import ModuleError, PolicyCallError, which_module_error
from headrace.workers.annex_parts import part
from headrace.workers.config import EnvRunnerConfig
from headrace.workers.connectors.additions import AgentOneHot, PreviousActionReward
from headrace.workers.connectors.connector import State
from headrace.workers.connectors.vector_connectors import VectorConnectors, split_states
from headrace.workers.envs.actions import action_root, to_env_form
from headrace.workers.envs.bounds import holds, whole_array
from headrace.workers.envs.observations import Observations
from headrace.workers.policy.acting_device import ActingDevice
from headrace.workers.policy.acting_module import ActingModule
from headrace.workers.policy.module_protocol import build_module, weights_bounded
from headrace.workers.policy.module_weights import weights_by_module, write_weights
from headrace.workers.policy.noise import ActionNoise
from headrace.workers.policy.policies import NO_EPISODE, Policies
from headrace.workers.trained.export import ExportedFile, export_policy

log = logging.getLogger(__name__)

Columns = Mapping[str, NDArray[Any]]
_Key = tuple[Any, str]
"""An agent (None: there is only one) and the module that plays it."""


class TrainedPolicy:
    """The modules of a trained policy, each with its connectors and its memory of running episodes.

        policy = load_policy("runs/a")
        observation, _ = env.reset()
        policy.reset()
        action = policy.act(observation)

    Connectors are frozen, so the same calls always give the same actions. One thread at a time may call it. Modules
    act on the `device` of the config.

    - spaces: module id -> both spaces of its envs, as data.
    - agents: ids of the env's possible agents; empty where there is only one.
    - source: where the weights come from, in words; version: (learner epoch, seq or count of updates).
    """

    def __init__(
        self,
        config: EnvRunnerConfig,
        spaces: Mapping[str, Spaces],
        arrays: Columns,
        *,
        agents: Sequence[Any] = (),
        source: str = "",
        version: tuple[int, int] = (0, 0),
        seed: int | None = None,
    ) -> None:
        """Build the modules for `spaces` and give them `arrays`: weights and connector state, as they are published.

        A module without weights in `arrays` acts as it was built. `seed` decides sampled actions. Raises `ConfigError`,
        also for a device that is not there, `ModuleError` and `ConnectorError`.
        """
        self._device: ActingDevice | None = None if config.device == "cpu" else part("open_device")(config.device)
        self._several = config.is_multi_agent
        several = config if self._several else config.model_copy(update={"policies": [next(iter(spaces))]})
        self._env = config.env
        self._policies = Policies.of(several)
        self.spaces, self.agents = dict(spaces), list(agents)
        self.source, self.version = source, version
        self._seeds = np.random.SeedSequence(seed)
        self._states: dict[str, dict[str, State]] = {}
        self.modules: dict[str, torch.nn.Module] = {}
        """Module id -> the torch module, in eval mode."""
        own = weights_by_module(arrays, list(spaces))
        for module_id in spaces:
            weights, self._states[module_id] = split_states(own.get(module_id, {}))
            self.modules[module_id] = self._build(module_id, weights)
            if self._device is not None:
                self.modules[module_id].to(self._device.place)
        self._players: dict[_Key, _Player] = {}
        self._checks_masks = True

    def __repr__(self) -> str:
        """Return env, module and weights in words."""
        names = {module_id: str(self._policies.specs[module_id].module) for module_id in self.modules}
        named = f"modules={names!r}" if len(names) > 1 else f"module={next(iter(names.values()))!r}"
        weights = self.source or f"version {self.version[0]}/{self.version[1]}"
        return f"TrainedPolicy(env={self._env!r}, {named}, weights={weights!r})"

    def _build(self, module_id: str, weights: State) -> torch.nn.Module:
        spec, connectors = self._policies.specs[module_id], self._connectors(module_id)
        try:
            with weights_bounded(weights):  # a stranger's settings may name layers of any size
                module: torch.nn.Module = build_module(spec.module, connectors.spaces, spec.module_config).eval()
        except NotImplementedError:
            raise ModuleError(f"the builder of module {module_id!r} gives none, so there is nothing to act") from None
        if weights:
            write_weights(module, weights)
            if not self._states[module_id] and any(connectors.get_state().values()):
                log.warning(
                    "%s has no state of the connectors of module %r, which act as if they had seen nothing; save what "
                    "ConnectorMerger.get_state gives beside the weights",
                    self.source or "the policy",
                    module_id,
                )
        return module

    def _connectors(self, module_id: str, rows: int = 1, agent: Any = None) -> VectorConnectors:
        """Return frozen connectors for `rows` episodes of `agent`."""
        spec, spaces = self._policies.specs[module_id], self.spaces[module_id]
        owner = f" of policy {module_id!r}" if len(self.spaces) > 1 else ""
        place = self.agents.index(agent) if agent in self.agents else 0
        first = Observations(spaces.observation, 0 if place else rows, check_bounds=False)
        connectors = VectorConnectors(spec.env_to_module, spec.module_to_env, spaces, first.columns, owner)
        if place:
            all_rows = Observations(spaces.observation, rows, check_bounds=False)
            connectors.widen(all_rows.columns, np.full(rows, place, np.intp))
        states = self._states[module_id]
        connectors.check_state(states)
        connectors.set_state(states)
        connectors.freeze()
        return connectors

    @property
    def module(self) -> torch.nn.Module:
        """The torch module, in eval mode. Raises `ModuleError` where there are several: see `modules`."""
        return self.modules[self._module_of(None, None)]

    def act(
        self,
        observation: Any,
        *,
        agent: Any = None,
        module_id: str | None = None,
        explore: bool = False,
        rewards: Any = None,
    ) -> Any:
        """Return the action for one observation, or actions (rows, ...) for a batch, in the nesting of the env's space.

        `observation` is nested as the env's space. In a batch, each array has one more axis in front, and each row is
        an episode of its own. The action is the most likely one; with `explore` it is sampled.

        With several policies, name the `agent` that observes, or the `module_id`. Each agent has a memory of its own.
        `rewards` are those of the last step, for connectors that look at them. `PreviousActionReward` must have them.

        Raises `PolicyCallError` where `rewards`, or an agent for `AgentOneHot`, are missing, for an observation that is
        not the policy's or has no legal action, or a batch of another size than the episodes that the policy remembers,
        `ModuleError` for no known module, and `ModuleError` and `ConnectorError` for their own failures.
        """
        module_id = self._module_of(agent, module_id)
        space = self.spaces[module_id].observation
        columns, many = _read(space, observation)
        rows = len(next(iter(columns.values())))
        player = self._player(agent, module_id, rows)
        if rewards is None and player.needs_rewards:
            raise PolicyCallError("PreviousActionReward shows the policy the last reward; call act(..., rewards=...)")
        rewards = np.broadcast_to(0.0 if rewards is None else rewards, rows)
        chosen = player.act(columns, rewards, explore, checks_masks=self._checks_masks)
        action, root = self.spaces[module_id].action, action_root(chosen)
        return nest(action, chosen, root) if many else to_env_form(action, chosen, root)[0]

    def reset(self, rows: Sequence[int] | None = None, *, agent: Any = None) -> None:
        """Forget the episodes of all rows of the last batch, or of `rows`; of one `agent`, or of all.

        Call it where an episode begins. A policy without memory does not need it.
        """
        for key, player in list(self._players.items()):
            if agent is None or key[0] == agent:
                if rows is None:
                    del self._players[key]
                else:
                    player.forget(rows)

    def with_own_memory(self) -> TrainedPolicy:
        """Return the same policy for other episodes: with the same modules, and a memory of its own."""
        other = copy.copy(self)
        other._players = {}
        return other

    def export(self, path: str | Path, module_id: str | None = None) -> Path:
        """Write the policy to `path` for other programs, and return the path. Its suffix names the format.

        - .pt: TorchScript, for `torch.jit.load` and C++
        - .pt2: an exported program, for `torch.export.load`
        - .onnx: ONNX, for onnxruntime and others (extra `onnx`)

        Inputs are the env's observations, one array (rows, ...) for each leaf of the space. Outputs are the actions
        that `act` gives for a batch, one array for each leaf. Raises `ModuleError` where a part does not allow it.
        """
        return self.export_file(path, module_id).path

    def export_file(self, path: str | Path, module_id: str | None = None) -> ExportedFile:
        """Do as `export`, and return what the file has: its inputs and outputs in their order, and how it was tried."""
        module_id = self._module_of(None, module_id)
        reference = self.with_own_memory()
        reference._checks_masks = False  # it is called with random observations
        if self._device is not None:
            reference._device, reference.modules = None, copy.deepcopy(self.modules)
        return export_policy(
            Path(path),
            reference.modules[module_id].cpu(),
            self._connectors(module_id),
            self.spaces[module_id],
            lambda observation: reference.act(observation, module_id=module_id),
        )

    def _module_of(self, agent: Any, module_id: str | None) -> str:
        if module_id is None and agent is not None and len(self.modules) > 1:
            module_id = self._policies.module_of(agent, NO_EPISODE)
        elif module_id is None and len(self.modules) == 1:
            module_id = next(iter(self.modules))
        if module_id is None or module_id not in self.modules:
            raise which_module_error(module_id, self.modules)
        return module_id

    def _player(self, agent: Any, module_id: str, rows: int) -> _Player:
        player = self._players.get((agent, module_id))
        if player is None or (player.rows != rows and not player.remembers):
            connectors = self._connectors(module_id, rows, agent)
            if self._several and agent not in self.agents and connectors.has(AgentOneHot):
                raise PolicyCallError(
                    f"AgentOneHot shows the policy which agent acts, and {agent!r:.80} is none of {self.agents!r:.99}; "
                    "name one of the env's agents (a policy loaded with spaces= knows none)"
                )
            module, spaces = self.modules[module_id], self.spaces[module_id]
            player = _Player(module_id, module, spaces, connectors, self._streams, self._device)
            self._players[agent, module_id] = player
        if player.rows != rows:
            raise PolicyCallError(
                f"the batch has {rows} rows, and the policy remembers {player.rows} episodes; call reset() where "
                "other episodes begin, or act by policy.with_own_memory()"
            )
        return player

    def _streams(self, rows: int) -> Iterator[np.random.Generator]:
        return map(np.random.default_rng, self._seeds.spawn(rows))


class _Player:
    """One module that plays `rows` episodes, with its memory of them."""

    def __init__(
        self,
        module_id: str,
        module: torch.nn.Module,
        env_spaces: Spaces,
        connectors: VectorConnectors,
        streams: Callable[[int], Iterator[np.random.Generator]],
        device: ActingDevice | None,
    ) -> None:
        self._connectors = connectors
        self.rows = rows = len(next(iter(connectors.columns.values())))
        noise = ActionNoise(lambda _: streams(rows), in_step=True)
        self._acting = ActingModule(module_id, env_spaces, connectors, noise)
        self._acting.use(module, lambda: 0, device)
        self.remembers = self._acting.remembers or connectors.first_not_exportable is not None
        """True if an action may depend on earlier observations."""
        self._begun = np.zeros(rows, bool)
        self._actions: Columns = {}
        """Actions of the last pass."""

    @property
    def needs_rewards(self) -> bool:
        """Return whether the next pass shows the module the reward of a last step."""
        return bool(self._begun.any()) and self._connectors.has(PreviousActionReward)

    def forget(self, rows: Sequence[int]) -> None:
        """Begin another episode in each of `rows`."""
        self._begun[np.asarray(rows, np.intp)] = False

    def act(
        self, columns: Columns, rewards: NDArray[np.float64], explore: bool, *, checks_masks: bool
    ) -> dict[str, NDArray[Any]]:
        """Return the module's columns and the env's actions for one more observation of each row."""
        for name, column in columns.items():
            self._connectors.observed[name][...] = column
        going, begins = np.flatnonzero(self._begun), np.flatnonzero(~self._begun)
        if len(begins):
            self._acting.start(begins)
        if len(going) and self._connectors.sees:
            actions = {name: column[going] for name, column in self._actions.items()}
            self._connectors.stepped(going, actions, np.asarray(rewards, np.float64)[going])
        if checks_masks and (faults := self._acting.faults(np.arange(self.rows), random_actions=False)):
            raise PolicyCallError(f"{faults[0][1]} in row {faults[0][0]}")
        chosen = self._acting.act(None, explore=explore, random_actions=False)
        self._actions = {name: chosen[name] for name in self._connectors.actions}
        self._begun[:] = True
        return chosen


def _read(space: Space, observation: Any) -> tuple[dict[str, NDArray[Any]], bool]:
    """Return (columns (rows, ...), whether the observation is a batch). Raises `PolicyCallError`."""
    columns: dict[str, NDArray[Any]] = {}
    sizes: set[int | None] = set()
    for (name, leaf), value in zip(leaves(space, "obs"), _values(space, observation), strict=True):
        shape, dtype = leaf_shape(leaf), column_dtype(leaf)
        try:
            array = whole_array(value)
        except ValueError as error:  # ragged, or with masked elements
            raise PolicyCallError(f"the observation's {name!r} is no array of numbers: {error}") from None
        many = array.ndim == len(shape) + 1 and array.shape[1:] == shape and len(array) > 0
        if not (many or array.shape == shape) or not np.can_cast(array.dtype, dtype, "same_kind"):
            raise PolicyCallError(
                f"the observation's {name!r} should be {dtype} {shape}, or {('rows', *shape)} in a batch, and is "
                f"{array.dtype} {array.shape}"
            )
        if not holds(dtype, array):
            seen = f"{array.min()} to {array.max()} as {array.dtype}"
            raise PolicyCallError(f"the observation's {name!r} has values from {seen}, which {dtype} does not hold")
        sizes.add(len(array) if many else None)
        columns[name] = (array if many else array[None]).astype(dtype)
    if len(sizes) > 1:
        raise PolicyCallError(f"the parts of the observation have {sorted(map(str, sizes))} rows; give all the same")
    return columns, None not in sizes


def _values(space: Space, observation: Any) -> list[Any]:
    """Return the value of each leaf, in the order of `leaves`. Raises `PolicyCallError`."""
    if not isinstance(space, Dict | Tuple):
        return [observation]
    parts = space.spaces if isinstance(space, Dict) else dict(enumerate(space.spaces))
    try:
        own = [(sub, observation[key]) for key, sub in parts.items()]
    except (KeyError, IndexError, TypeError):
        seen = f"{observation!r:.80}"
        raise PolicyCallError(f"the observation should have the parts {list(parts)!r:.200}, and is {seen}") from None
    return [value for sub, part in own for value in _values(sub, part)]
