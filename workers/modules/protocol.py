"""What a policy module must answer, and how one is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from numpy.typing import NDArray

from headrace.schemas.errors import ConfigError, HeadraceError, ModuleError
from headrace.schemas.spaces import Spaces

NumpyAct = Callable[[Mapping[str, NDArray[Any]], "NDArray[Any] | None"], dict[str, NDArray[Any]]]
"""(observation columns, noise or None for the mode) -> step columns by name, all (rows, ...)."""


@runtime_checkable
class PolicyModule(Protocol):
    """A torch module that acts. `batch["obs"]` is a tensor (rows, ...), or nested as the observation space is.

    `batch["noise"]` is float32 (rows, noise_size): uniform in [0, 1) or standard normal by `noise_kind`. A module
    samples from these and from nothing else, so that what an env experiences does not depend on its neighbours.
    `batch["t"]`, in `forward_exploration` only, is how many env steps the whole fleet has made so far, an int that
    never goes back, for such as schedules of epsilon: see `EnvRunner.fleet_steps`. By it alone may neighbours change
    what an env experiences, so whoever wants samples that repeat exactly leaves it unread.

    Both `forward_exploration` and `forward_inference` (the mode; no noise) answer {"actions": as nested as the action
    space, and by choice "actions_for_env": likewise, what the env gets instead; "logp", "values",
    "action_dist_inputs", or any other column (rows, ...)}. `forward_train({"obs": ...})` answers what a learner needs.
    A module may also have `numpy_act()`, which gives a function that does the same as `forward_exploration` and
    `forward_inference` on arrays, reading the parameters in place. It is not told "t": a module that
    reads "t" has none.

    With `logp(dist_inputs, actions)`, as learners need it, and "action_dist_inputs" in its answers, actions that an
    external env logs get a log-prob too; where it answers "actions_for_env", it needs `policy_actions(env_actions)` for
    that: columns "actions/..." for which the env would have got those.

    Workers act on the CPU, where an env's step takes as long as the pass and a GPU's latency would be longer than both;
    `forward_train` runs wherever the learner put the module.
    """

    noise_size: int
    noise_kind: Literal["uniform", "normal"]

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]: ...
    def forward_inference(self, batch: dict[str, Any]) -> dict[str, Any]: ...
    def forward_train(self, batch: dict[str, Any]) -> dict[str, Any]: ...


@runtime_checkable
class RecurrentModule(PolicyModule, Protocol):
    """A module that remembers. `initial_state` is one row of each part of its state, by name, without a rows axis.

    `forward_exploration` and `forward_inference` get {"state_in": {name: (rows, ...)}} besides, and answer "state_out"
    likewise: the state_in of the next step. State begins anew with each episode and goes on across chunks, each of
    which carries the state before its first step. `forward_train` gets sequences: see `sequences`. `numpy_act` is not
    used.
    """

    def initial_state(self) -> dict[str, torch.Tensor]: ...


def build_module(module: str | Callable[..., Any], spaces: Spaces, module_config: Mapping[str, Any]) -> Any:
    """`module` built for `spaces`. Raises `ModuleError`; NotImplementedError passes, for it means: no policy here."""
    build = _find(module) if isinstance(module, str) else module
    try:
        built = build(spaces, **module_config)
    except (HeadraceError, NotImplementedError):
        raise
    except Exception as error:
        raise ModuleError(
            f"module {module!r} could not be built ({type(error).__name__}: {error}); it is called as "
            f"build(spaces, **module_config) with module_config = {dict(module_config)!r:.200}"
        ) from error
    if not isinstance(built, torch.nn.Module) or not isinstance(built, PolicyModule):
        raise ModuleError(
            f"module {module!r} gave a {type(built).__name__}; it must be a torch.nn.Module with noise_size, "
            "noise_kind, forward_exploration, forward_inference and forward_train"
        )
    return built


def _find(path: str) -> Callable[..., Any]:
    name, colon, attribute = path.partition(":")
    if not colon or not name or not attribute:
        raise ConfigError(f"{path!r} is not of the form 'package.module:build'", key="module")
    try:
        found: Any = import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ModuleError(
            f"module {path!r} cannot be found ({error}); check the path and that it is importable"
        ) from error
    if not callable(found):
        raise ModuleError(
            f"module {path!r} is a {type(found).__name__}; name a function build(spaces, **module_config)"
        )
    return found  # type: ignore[no-any-return]
