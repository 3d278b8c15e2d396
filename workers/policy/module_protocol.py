"""The protocol of a policy module, and how one is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from threading import get_ident
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray
from torch.nn.modules import module as module_hooks

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.chunks.spaces import Spaces
from headrace.schemas.errors import ConfigError, HeadraceError, ModuleError, words_of
from headrace.schemas.settings.plugins import AT_THE_TOP

NumpyAct = Callable[[Mapping[str, NDArray[Any]], "NDArray[Any] | None"], dict[str, NDArray[Any]]]
"""(observation columns, noise or None for the mode) -> step columns by name, all (rows, ...)."""
_MOST_ARRAYS, _MOST_BYTES = 4_096, 256 << 20
"""Those of a module built for few weights or none, at most."""
OUTPUTS = "outputs"
"""The column of what a `SplitAct` records at each step, in place of the columns that `complete` makes from it."""


@runtime_checkable
class SplitAct(Protocol):
    """A `NumpyAct` that can also choose actions first, and make the other columns later, for many steps at once.

    `complete` must depend on the recorded rows alone and not on the weights, which may have changed since.
    """

    def __call__(self, columns: Mapping[str, NDArray[Any]], noise: NDArray[Any] | None, /) -> dict[str, NDArray[Any]]:
        """Return all step columns."""

    def choose(self, columns: Mapping[str, NDArray[Any]], noise: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
        """Return the action columns, and `OUTPUTS`, which the next call may overwrite."""

    def complete(self, columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the other columns (rows, ...) for recorded columns of `choose` (rows, ...)."""


@runtime_checkable
class PolicyModule(Protocol):
    """A torch module that acts.

    `batch["obs"]` is a tensor (rows, ...), or nested as the observation space is. `batch["noise"]` is float32 (rows,
    noise_size): uniform in [0, 1) or standard normal, by `noise_kind`. A module samples from this noise and from
    nothing else, so that the episodes of an env do not depend on its neighbours.

    `batch["t"]`, in `forward_exploration` only, is the number of env steps that the whole fleet has made so far. It is
    an int that never decreases, for uses such as schedules of epsilon: see `EnvRunner.fleet_steps`. It is the only way
    in which neighbours may change an env's episodes. For samples that repeat exactly, do not read it.

    Both `forward_exploration` and `forward_inference` (the mode; no noise) return a dict:

    - "actions", nested as the action space is
    - optional "actions_for_env", nested the same way: what the env gets instead
    - "logp", "values", "action_dist_inputs", or any other column (rows, ...)

    The fleet's own learner also needs `forward_train({"obs": ...})`, `logp` and `entropy`. Workers do not call them.

    A module may have `numpy_act()`. It returns a function that does the same as `forward_exploration` and
    `forward_inference` on arrays, and reads the parameters in place. The returned function gets no "t", so a module
    that reads "t" must not have `numpy_act`.

    A module may have `torch_inference(batch)`. It returns "actions", and "actions_for_env" if there are any, as
    `forward_inference` does, by torch operations alone. An export is made of it, or else of `forward_inference`.

    Actions that an external env logs get a log-prob too, if the module returns "action_dist_inputs" and has
    `logp(dist_inputs, actions)`, as learners need it. If it returns "actions_for_env", it also needs
    `policy_actions(env_actions)`, which returns the columns "actions/..." for which the env would have got
    `env_actions`.

    A module that chooses the actions of several steps in one pass has `action_chunk_size`, their number. All its
    answers are then (rows, action_chunk_size, ...): see `ActionChunks`.

    On another device (`sampling.device`) the batch's tensors are there. "state_in" never leaves it; all other answers
    come back together. There `numpy_act` is not used. A module may have `forward_outputs(batch)` and `act_on(outputs,
    noise)`. Only the first is then called there. The second gets those tensors on the CPU, and the noise or None as an
    array, and returns the answer. `forward_train` runs wherever the learner put the module.
    """

    noise_size: int
    noise_kind: Literal["uniform", "normal"]

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]: ...
    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]: ...


@runtime_checkable
class RecurrentModule(PolicyModule, Protocol):
    """A module with memory. `initial_state` returns one row of each part of its state, by name, without a rows axis.

    `forward_exploration` and `forward_inference` also get {"state_in": {name: (rows, ...)}}. They also return
    "state_out", in the same form: the state_in of the next step. State starts from `initial_state` with each episode
    and continues across chunks. Each chunk carries the state before its first step. `forward_train` gets sequences: see
    `sequences`. `numpy_act` is not used.
    """

    def initial_state(self) -> dict[str, torch.Tensor]: ...


def action_chunk_size(module: Any) -> int:
    """Return of how many steps one pass chooses the actions: 1 for most modules.

    Raises `ModuleError` for what is no such number, and for a module with memory or action masks: both need to look at
    each step.
    """
    size = getattr(module, "action_chunk_size", 1)
    name = type(module).__name__
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ModuleError(
            f"action_chunk_size = {size!r:.80} of the policy {name} is no number of steps; give 1 or more"
        )
    for needs, what in (("initial_state", "a memory"), ("obeys_action_mask", "action masks")):
        if size > 1 and getattr(module, needs, None):
            raise ModuleError(
                f"the policy {name} has {what}, which it needs at each step, and an action_chunk_size of {size}: leave "
                "one of the two out"
            )
    return size


def has_newest(module: Any, name: str, *others: str) -> bool:
    """Return whether `module` has `name`, and none of `others` was defined anew after it.

    A class that derives from a module with `numpy_act`, and has a `forward_exploration` of its own, acts by that one.
    """
    homes = [getattr(module, "__dict__", {}), *map(vars, type(module).__mro__)]

    def depth(attribute: str) -> int:
        return next((depth for depth, home in enumerate(homes) if attribute in home), len(homes))

    return callable(getattr(module, name, None)) and all(depth(name) <= depth(other) for other in others)


def build_module(module: str | Callable[..., Any], spaces: Spaces, module_config: Mapping[str, Any]) -> Any:
    """Return `module` built for `spaces`.

    Raises `ConfigError` or `ModuleError`. NotImplementedError passes through: it means that this runner has no
    module.
    """
    build = _find(module) if isinstance(module, str) else module
    try:
        built = build(spaces, **module_config)
    except (HeadraceError, NotImplementedError):
        raise
    except BaseException as error:
        raise_stop(error)
        raise ModuleError(
            f"module {module!r} could not be built ({words_of(error)}); it is called as "
            f"build(spaces, **module_config) with module_config = {dict(module_config)!r:.200}"
        ) from error
    if not isinstance(built, torch.nn.Module) or not isinstance(built, PolicyModule):
        raise ModuleError(
            f"module {module!r} gave a {type(built).__name__}; it must be a torch.nn.Module with noise_size, "
            "noise_kind, forward_exploration and forward_inference"
        )
    return built


def compile_passes(module: Any) -> None:
    """Let `torch.compile` make the module's passes at their first calls, or `forward_outputs` where passes call that.

    Raises `ModuleError` where torch has no compiler for this version of Python.
    """
    both = "forward_exploration", "forward_inference"
    for name in ("forward_outputs",) if has_newest(module, "forward_outputs", *both) else both:
        try:
            setattr(module, name, torch.compile(getattr(module, name)))
        except RuntimeError as error:
            raise ModuleError(f"module.compile = true cannot be had here: {words_of(error)}") from error


@contextmanager
def weights_bounded(weights: Mapping[str, NDArray[Any]]) -> Iterator[None]:
    """Bound the parameters and buffers of each module that this thread builds, for which these `weights` are.

    Raises `ModuleError` as soon as there is an array too many or bytes too many. torch has then reserved memory for the
    array and written nothing to it. Use it for settings from a file that is not the user's own.
    """
    thread, arrays, nbytes = get_ident(), 0, 0
    most_arrays = max(_MOST_ARRAYS, 2 * len(weights))
    most_bytes = max(_MOST_BYTES, 4 * sum(array.nbytes for array in weights.values()))  # a float8 as a float32

    def count(module: torch.nn.Module, name: str, array: torch.Tensor | None) -> None:
        nonlocal arrays, nbytes
        if array is None or get_ident() != thread:
            return
        arrays, nbytes = arrays + 1, nbytes + array.numel() * array.element_size()
        if arrays > most_arrays or nbytes > most_bytes:
            raise ModuleError(
                f"the module has {arrays:,} arrays of {nbytes >> 20:,} MiB with {name!r} {list(array.shape)} of a "
                f"{type(module).__name__}; for its {len(weights):,} weights, {most_arrays:,} of "
                f"{most_bytes >> 20:,} MiB are allowed"
            )

    hooks = [
        module_hooks.register_module_parameter_registration_hook(count),
        module_hooks.register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _find(path: str) -> Callable[..., Any]:
    name, colon, attribute = path.partition(":")
    if not colon or not name or not attribute:
        raise ConfigError(f"{path!r} is not of the form 'package.module:build'", key="module")
    try:
        found: Any = import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        advice = AT_THE_TOP if isinstance(error, AttributeError) else "check the path and that it is importable"
        raise ModuleError(f"module {path!r} cannot be found ({error}); {advice}") from error
    if not callable(found):
        raise ModuleError(
            f"module {path!r} is a {type(found).__name__}; name a function build(spaces, **module_config)"
        )
    return found  # type: ignore[no-any-return]
