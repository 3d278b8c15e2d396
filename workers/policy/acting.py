"""One forward pass of a policy for all envs of a vector: observation columns in, step columns out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.basics.tensor_array import array_of, wide_array_of
from headrace.schemas.chunks.batch import STATE_IN, is_obs_column
from headrace.schemas.chunks.chunk import LOOKBACK
from headrace.schemas.chunks.gymnasium_spaces import to_gym
from headrace.schemas.chunks.spaces import Dict, Leaf, Space, Spaces, Tuple, column_dtype, leaf_shape, leaves, nest
from headrace.schemas.errors import ModuleError, NotFiniteError, words_of
from headrace.workers.envs.actions import action_root
from headrace.workers.envs.bounds import ActionLimits
from headrace.workers.policy.acting_device import ActingDevice, LaneMemory, ModulePass
from headrace.workers.policy.module_protocol import OUTPUTS, SplitAct, action_chunk_size, has_newest
from headrace.workers.policy.recurrent import Memory

Columns = dict[str, NDArray[Any]]

ACTION_CHUNK_STEP = "action_chunk_step"
"""The column that tells which step of its action chunk an action was."""
SAMPLERS_OWN = frozenset(("rewards", "weights_seq", "env_t", ACTION_CHUNK_STEP))
_LOGITS = "action_dist_inputs"
"""The column in which an action that is not allowed may have -inf."""
_FINITE = frozenset(("actions", "actions_for_env", "logp", "values", _LOGITS, OUTPUTS))
"""Columns that must be finite. The others are the user's own."""


class Actor:
    """Calls `module` with the observations in `columns` (width, ...), which it reads again at each call.

    `count_steps` returns how many steps the fleet has made; it is called when a module without `numpy_act` explores.
    The actor acts for all lanes, or for `lanes` alone, and then advances only their rows of `memory`. With `device`,
    the module acts there. It returns flat column names ("actions/arm/0"). Raises `ModuleError` when the module raises
    or returns wrong shapes.
    """

    def __init__(
        self,
        module: Any,
        spaces: Spaces,
        columns: Mapping[str, NDArray[Any]],
        count_steps: Callable[[], int],
        lanes: NDArray[np.intp] | None = None,
        memory: LaneMemory | None = None,
        device: ActingDevice | None = None,
    ) -> None:
        self._module = module
        self._spaces = spaces
        self._device = device
        self._everybody = columns
        self._lanes = lanes
        if lanes is not None:
            columns = {name: column[lanes] for name, column in columns.items()}
        self._columns = columns
        self._count_steps = count_steps
        self._width = len(next(iter(columns.values())))
        size = action_chunk_size(module)
        self._form = (self._width,) if size == 1 else (self._width, size)
        """The first axes of all columns."""
        if lanes is None:
            memory = _memory_of(module, self._width, device)
        self.memory = memory
        """The state of a recurrent module, by lane. Each call advances it, unless it raises."""
        self._state_out: Any = None
        forward = "forward_exploration", "forward_inference", "forward_train"
        fast = device is None and self.memory is None and has_newest(module, "numpy_act", *forward)
        self._pass: ModulePass | None = None
        try:
            self._act = module.numpy_act() if fast else None
            if device is not None:
                self._pass = device.passes(module, spaces.observation, columns, memory, lanes)
        except BaseException as error:
            raise_stop(error)
            raise self._failure(error) from error
        self.split: SplitAct | None = self._act if lanes is None and isinstance(self._act, SplitAct) else None
        """The module's function that can choose actions first and make other columns later; None without one."""
        tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
        self._batch_obs = nest(spaces.observation, tensors, "obs")  # type: ignore[arg-type]
        self._expected = dict(leaves(spaces.action, "actions"))
        self._limits: ActionLimits | None = None
        """The bounds of choices for the env. None before the first pass, and for a module of Headrace's own."""
        self._watched: dict[tuple[bool, bool], list[str]] = {}
        """The columns that must be finite, by (takes the mode, makes all columns), once their form was checked."""
        self.names: dict[tuple[bool, bool], frozenset[str]] = {}
        """The names of all columns, by the same."""

    def __call__(
        self, noise: NDArray[np.float32] | None, acting: NDArray[np.intp] | None = None, *, whole: bool = True
    ) -> Columns:
        """Return the columns of one step. With `noise` None, the policy takes its mode.

        All rows are computed. The memory changes only in rows of `acting` (None: all). Without `whole`, return what
        `split` chooses.
        """
        if self._lanes is not None:
            for name, rows in self._columns.items():
                rows[...] = self._everybody[name][self._lanes]
        try:
            if self._act is None:
                columns = self._forward(noise, acting)
            elif whole or self.split is None:
                columns = self._act(self._columns, noise)
            else:
                columns = self.split.choose(self._columns, noise)
            form = noise is None, whole
            if form not in self._watched:
                self._check(columns)
                self._watched[form] = [name for name, column in columns.items() if _must_be_finite(name, column)]
            if (names := self.names.get(form)) is None:
                self.names[form] = frozenset(columns)
            elif columns.keys() != names:  # rows without a value would be memory that nobody wrote
                was, now = sorted(names), sorted(columns)
                raise ModuleError(
                    f"the policy {type(self._module).__name__} answered the columns {was} at one step, and {now} at "
                    "another; answer the same at each step"
                )
            for name in self._watched[form]:
                # One pass, and the usual case. The sum is not finite if one of the numbers is not, or if it overflows.
                if name in columns and not math.isfinite(np.vdot(columns[name], columns[name])):
                    self._check_finite(name, columns[name], acting)
            if self._limits is not None and self._limits.problem(columns):
                self._check_limits(self._limits, columns, acting)
            if isinstance(self.memory, Memory):
                self.memory.take(self._state_out, acting, self._lanes)
            elif self._pass is not None:
                self._pass.keep(self._state_out, acting)
        except ModuleError:
            raise
        except BaseException as error:
            raise_stop(error)
            raise self._failure(error) from error
        return columns

    def _failure(self, error: BaseException) -> ModuleError:
        sentence = f"the policy {type(self._module).__name__} failed while acting: {words_of(error)}"
        if self._device is not None:
            sentence += (
                f"; sampling.device has moved it to {self._device.place}: its tensors move along only if they are "
                "parameters or buffers, and it gets tensors there; else take sampling.device = 'cpu'"
            )
        elif elsewhere := {str(tensor.device) for tensor in self._module.state_dict().values()} - {"cpu"}:
            sentence += (
                f"; it is on {min(elsewhere)}, and a worker gives it tensors on the CPU: build it there, and move only "
                "the learner's module"
            )
        return ModuleError(sentence)

    def _answer(self, noise: NDArray[np.float32] | None) -> Any:
        batch: dict[str, Any] = {"obs": self._batch_obs}
        if isinstance(self.memory, Memory):
            batch["state_in"] = self.memory.tensors(self._lanes)
        with torch.inference_mode():
            if noise is None:
                return self._module.forward_inference(batch)
            batch |= {"noise": torch.from_numpy(noise), "t": self._count_steps()}
            return self._module.forward_exploration(batch)

    def _forward(self, noise: NDArray[np.float32] | None, acting: NDArray[np.intp] | None) -> Columns:
        through = self._pass
        answer = self._answer(noise) if through is None else through(noise, acting, self._count_steps)
        if not isinstance(answer, dict) or "actions" not in answer:
            raise ModuleError(f"the policy answered {answer!r:.80}; it must be a dict with 'actions'")
        self._state_out = answer.get("state_out")
        columns: Columns = {}
        for name, value in answer.items():
            if name == "state_out":
                continue
            nested = name in ("actions", "actions_for_env")
            parts = flatten_actions(self._spaces.action, value, name) if nested else {name: value}
            columns.update({part: _array(part, tensor) for part, tensor in parts.items()})
        root = "actions_for_env" if "actions_for_env" in answer else "actions"
        for name, leaf in leaves(self._spaces.action, root):
            given, dtype = columns[name], column_dtype(leaf)
            if given.dtype.kind == "f" and dtype.kind != "f":
                self._check_finite(name, given, acting)  # a cast would make numbers of NaN
            if given.dtype != dtype:
                columns[name] = self._cast(name, given, leaf, acting)
        return columns

    def _cast(self, name: str, given: NDArray[Any], leaf: Leaf, acting: NDArray[np.intp] | None) -> NDArray[Any]:
        """Return actions in the dtype of their space. Raises `ModuleError` for a choice or integer that it changes."""
        with np.errstate(invalid="ignore", over="ignore"):  # what does not fit is found below, or is infinite then
            cast: NDArray[Any] = given.astype(column_dtype(leaf))
        rows = self._of(acting)
        changed = cast != given if rows is None else (cast != given)[rows]
        if cast.dtype.kind != "f" and changed.any():
            seen = f"{name} {(given if rows is None else given[rows])[changed][0]} of {given.dtype}"
            raise ModuleError(f"the policy {type(self._module).__name__} gives {seen}, outside {to_gym(leaf)}")
        return cast

    def _of(self, acting: NDArray[np.intp] | None) -> NDArray[Any] | None:
        """Return the rows of `acting` in the pass's columns; None for all. The other rows have no meaning."""
        return acting if acting is None or self._lanes is None else np.isin(self._lanes, acting)

    def _check_finite(self, name: str, column: NDArray[Any], acting: NDArray[np.intp] | None) -> None:
        """Raise `NotFiniteError` for NaN and infinities in the rows that act. Inputs of a distribution may be -inf."""
        those = self._of(acting)
        rows = column if those is None else column[those]
        bad = np.isnan(rows) | (rows == np.inf) if name == _LOGITS else ~np.isfinite(rows)
        if bad.any():
            kind, count = ("NaN" if np.isnan(rows).any() else "infinite"), int(bad.sum())
            sentence = (
                f"the policy {type(self._module).__name__} gives {kind} {name}: {count} of {rows.size} values are not "
                "finite; look at its weights, and for a division by 0 or a logarithm of 0 in it"
            )
            raise NotFiniteError(name, count, rows.size, sentence)

    def _check_limits(self, limits: ActionLimits, columns: Columns, acting: NDArray[np.intp] | None) -> None:
        if problem := limits.problem(columns, self._of(acting)):
            raise ModuleError(f"the policy {type(self._module).__name__} gives {problem}; look at its outputs")

    def _check(self, columns: Columns) -> None:
        for name, leaf in self._expected.items():
            shape = (*self._form, *leaf_shape(leaf))
            if name not in columns or columns[name].shape != shape:
                seen = columns[name].shape if name in columns else "absent"
                raise ModuleError(f"the policy's column {name!r} should have shape {shape}, and is {seen}")
        root = action_root(columns)
        for name, leaf in leaves(self._spaces.action, root):
            if columns[name].dtype != column_dtype(leaf):
                raise ModuleError(f"the policy's column {name!r} is {columns[name].dtype}, not {column_dtype(leaf)}")
        if not type(self._module).__module__.startswith("headrace."):
            self._limits = ActionLimits(self._spaces.action, root)
        for name, column in columns.items():
            if name.startswith((LOOKBACK, STATE_IN)) or is_obs_column(name) or name in SAMPLERS_OWN:
                raise ModuleError(f"the policy's column {name!r} has a name that is the runner's own; choose another")
            if column.shape[: len(self._form)] != self._form:
                of = f" of {self._form[1]} steps" if len(self._form) > 1 else ""
                raise ModuleError(f"the policy's column {name!r} has shape {column.shape}, not {self._width} rows{of}")


class BlockActor:
    """Acts for disjoint `blocks` of lanes, which together are all lanes. Half the lanes cost half a pass.

    The rounding of a pass depends on its number of rows. So a block always passes whole, whichever of its lanes can
    act. The episodes of a lane then do not depend on which lanes are ready when.
    """

    def __init__(
        self,
        module: Any,
        spaces: Spaces,
        columns: Mapping[str, NDArray[Any]],
        count_steps: Callable[[], int],
        blocks: Sequence[NDArray[np.intp]],
        device: ActingDevice | None = None,
    ) -> None:
        self._width = len(next(iter(columns.values())))
        self.memory = memory = _memory_of(module, self._width, device)
        self.split = None
        parts = module, spaces, columns, count_steps
        self._blocks = [(lanes, Actor(*parts, lanes, memory, device)) for lanes in blocks]
        for _, actor in self._blocks:
            actor.names = self._blocks[0][1].names
        self._block_of = np.empty(self._width, np.intp)
        for block, lanes in enumerate(blocks):
            self._block_of[lanes] = block

    def __call__(
        self, noise: NDArray[np.float32] | None, acting: NDArray[np.intp] | None = None, *, whole: bool = True
    ) -> Columns:
        """Return all columns (width, ...) as `Actor` does. Only the rows of `acting` (None: all) are valid."""
        columns: Columns = {}
        acting = np.arange(self._width) if acting is None else acting
        for block in np.unique(self._block_of[acting]).tolist():
            lanes, actor = self._blocks[block]
            there = acting[self._block_of[acting] == block]
            for name, rows in actor(None if noise is None else noise[lanes], there).items():
                if name not in columns:
                    columns[name] = np.zeros((self._width, *rows.shape[1:]), rows.dtype)
                columns[name][lanes] = rows
        return columns


def _memory_of(module: Any, width: int, device: ActingDevice | None) -> LaneMemory | None:
    if not hasattr(module, "initial_state"):
        return None
    return Memory(module, width) if device is None else device.memory(module, width)


def flatten_actions(space: Space, value: Any, root: str) -> dict[str, Any]:
    """Return the leaves of a policy's nested actions by column name. Raises `ModuleError` for another nesting."""
    try:
        if isinstance(space, Dict):
            parts = [flatten_actions(sub, value[key], f"{root}/{key}") for key, sub in space.spaces.items()]
        elif isinstance(space, Tuple):
            parts = [flatten_actions(sub, value[index], f"{root}/{index}") for index, sub in enumerate(space.spaces)]
        else:
            return {root: value}
    except (KeyError, IndexError, TypeError) as error:
        raise ModuleError(f"the policy's {root!r} is not nested as the action space is ({error!r})") from error
    return {name: column for part in parts for name, column in part.items()}


def _must_be_finite(name: str, column: NDArray[Any]) -> bool:
    return column.dtype.kind == "f" and name.split("/", 1)[0] in _FINITE


def _array(name: str, value: Any) -> NDArray[Any]:
    if not isinstance(value, torch.Tensor):
        raise ModuleError(f"the policy's column {name!r} is a {type(value).__name__}, not a tensor")
    return (wide_array_of if name.split("/", 1)[0] in _FINITE else array_of)(value)
