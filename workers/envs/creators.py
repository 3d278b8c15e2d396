"""Turns the name of an env in a config into a function that builds one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from gymnasium.envs.registration import ENV_ID_RE, EnvSpec, find_highest_version

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import (
    EnvContractError,
    EnvError,
    HeadraceError,
    UnknownEnvError,
    missing_env_error,
    words_of,
)
from headrace.schemas.settings.plugins import AT_THE_TOP, where_to_find
from headrace.workers.annex_parts import part
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.error_text import seed_hint
from headrace.workers.envs.ownership import claim

if TYPE_CHECKING:  # there are many processes of envs, and they start faster without it
    from headrace.workers.config import EnvRunnerConfig

EnvCreator = Callable[[EnvContext], Any]

_registered: dict[str, EnvCreator] = {}
_CONTEXT_NAMES = frozenset(("config", "env_config", "context", "env_context", "ctx"))
_REGISTERED_BY = {"ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid"}
"""Prefix of the ids of another package than gymnasium -> the package that registers them when it is imported."""
_EXTRA = "envs"
"""The extra of Headrace that installs these packages."""


def register_env(name: str, creator: EnvCreator) -> None:
    """Let `EnvRunnerConfig(env=name)` mean `creator` in this process. A second registration replaces the first."""
    _registered[name] = creator


def registered_creator(name: str) -> EnvCreator | None:
    """Return the creator that `register_env` was given for `name`."""
    return _registered.get(name)


def find_creator(env: str | Callable[..., Any] | None) -> EnvCreator:
    """Return the creator of `env`: a registered name, import path, gymnasium id or "module:id", class or callable.

    Raises `ConfigError` for None, and `UnknownEnvError` for a name that stands for no env.
    """
    if env is None:
        raise missing_env_error()
    if not isinstance(env, str):
        return _of_callable(env)
    if env in _registered:
        return _of_callable(_registered[env])
    module, colon, attribute = env.partition(":")
    if colon and all(part.isidentifier() for part in attribute.split(".")):
        try:
            return _of_callable(_import(env, module, attribute))
        except UnknownEnvError:
            if _newest(attribute) is None:
                raise
    spec = gym_spec(env)
    # Headrace checks all envs of a poll at once, which makes gymnasium's own checker a second cost.
    return lambda context: gym.make(spec, disable_env_checker=True, **context)


@contextmanager
def naming_what_failed(config: EnvRunnerConfig, index: int) -> Iterator[None]:
    """Turn a creator's error in this block into an `EnvError` that names the env. Headrace's own errors pass."""
    try:
        yield
    except HeadraceError:
        raise
    except BaseException as error:
        raise_stop(error)
        what = f"env {index} ({config.env!r}) could not be built"
        said = words_of(error)
        hint = seed_hint(said, config.max_env_seed)
        raise EnvError(f"{what}: {said}; check env and env_config{hint}") from error


def build_env(creator: EnvCreator, context: EnvContext) -> gym.Env[Any, Any]:
    """Return one gymnasium env. Raises `EnvContractError` for another kind, and the creator's own errors."""
    env = creator(context)
    claim(env, context.life, context.vector_index, recreated=context.recreated)
    if "dm_env" in sys.modules:
        # The creator has loaded it. dm_env is no dependency of Headrace.
        env = part("as_gymnasium")(env)
    seen = f"{type(env).__module__}.{type(env).__qualname__}"
    if hasattr(getattr(env, "unwrapped", env), "possible_agents"):  # gymnasium's wrappers hide it
        expected = (
            "a gymnasium.Env of one agent; for an env of several agents give `policies` and take MultiAgentEnvRunner, "
            """or in a fleet set sampling.policies, as by --set 'sampling.policies={"shared": {}}'"""
        )
        raise EnvContractError("environment", seen, expected)
    if not isinstance(env, gym.Env):
        raise EnvContractError("environment", seen, "a gymnasium.Env, one of dm_env's, or a vector of either kind")
    return env


def _import(env: str, module: str, attribute: str) -> Callable[..., Any]:
    try:
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        where = f"; {AT_THE_TOP}" if isinstance(error, AttributeError) else _where_to_look(error, module, attribute)
        raise UnknownEnvError(env, f"{error}{_hint(env)}{where}") from error
    if not callable(found):
        what = "an env that is already built" if hasattr(found, "reset") else "not callable"
        raise UnknownEnvError(env, f"{attribute}, a {type(found).__name__}, is {what}")
    return found  # type: ignore[no-any-return]


def gym_spec(env_id: str) -> EnvSpec:
    """Return gymnasium's spec of an id, or of "module:id", where the module registers it. Raises `UnknownEnvError`."""
    module, colon, own_id = env_id.partition(":")
    try:
        if colon:
            import_module(module)
        return _newest(own_id if colon else env_id) or gym.spec(own_id if colon else env_id)
    except (gym.error.Error, ImportError, ValueError) as error:
        where = _where_to_look(error, module, own_id) if colon else ""
        raise UnknownEnvError(env_id, f"{error}{_hint(env_id)}{where}") from error


def _newest(own_id: str) -> EnvSpec | None:
    """Return the spec of a registered id, of the latest version if the id names none, as `gymnasium.make` does."""
    if own_id in gym.registry:
        return gym.registry[own_id]
    match = ENV_ID_RE.fullmatch(own_id)
    newest = find_highest_version(match["namespace"], match["name"]) if match and not match["version"] else None
    return None if newest is None else gym.registry[f"{own_id}-v{newest}"]


def _hint(env_id: str) -> str:
    """Return how to name, or to install, an env of a package that Headrace knows; empty for others."""
    module, colon, _ = env_id.partition(":")
    package = module if colon else next((p for start, p in _REGISTERED_BY.items() if env_id.startswith(start)), "")
    if package not in _REGISTERED_BY.values():
        return ""
    hints = [] if find_spec(package) else [f"`pip install 'headrace[{_EXTRA}]'` installs {package}"]
    hints += [] if colon else [f"{package} registers this id, so write '{package}:{env_id}'"]
    return "".join(f"; {hint}" for hint in hints)


def _where_to_look(error: Exception, module: str, attribute: str) -> str:
    """Return how to name a module that was not found, or where it is looked for; empty for another error."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    if module.endswith(".py"):
        return f"; write '{module.removesuffix('.py')}:{attribute}'"
    return f"; {where_to_find(error)}"


def _of_callable(target: Callable[..., Any]) -> EnvCreator:
    """Return a creator that gives `target` the context if it takes such an argument, else the config's items.

    So a config can name PettingZoo's `env(**kwargs)` directly.
    """
    try:
        parameters = [*inspect.signature(target).parameters.values()]
    except ValueError:  # some functions written in C have no signature
        return target
    is_class = inspect.isclass(target)
    return lambda context: target(context) if _takes_context(parameters, is_class, context) else target(**context)


def _takes_context(parameters: Sequence[inspect.Parameter], is_class: bool, env_config: Mapping[str, Any]) -> bool:
    """Return whether the first argument of a class or function is for the context, as far as its signature tells.

    It is not where keys of `env_config` name arguments that must be given, or any argument if the first is optional.
    """
    first = next((p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)), None)
    if first is None:
        return not is_class and any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if first.name in _CONTEXT_NAMES:
        return True
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    wanted = {p.name for p in by_name if p.default is p.empty or first.default is not first.empty}
    return not wanted & env_config.keys() and (not is_class or first.default is first.empty)
