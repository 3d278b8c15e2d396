"""From what a config calls an env to a function that builds one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from headrace.schemas.errors import EnvContractError, EnvError, HeadraceError, MissingEnvError, UnknownEnvError
from headrace.workers.envs.context import EnvContext
from headrace.workers.envs.error_text import message_of

if TYPE_CHECKING:  # processes of envs, of which there are many, start without it
    from headrace.workers.config import EnvRunnerConfig

EnvCreator = Callable[[EnvContext], Any]

_registered: dict[str, EnvCreator] = {}
_CONTEXT_NAMES = frozenset(("config", "env_config", "context", "env_context", "ctx"))


def register_env(name: str, creator: EnvCreator) -> None:
    """Let `EnvRunnerConfig(env=name)` mean `creator` in this process; a name given again is replaced."""
    _registered[name] = creator


def registered_creator(name: str) -> EnvCreator | None:
    """What `register_env` was given for `name`."""
    return _registered.get(name)


def find_creator(env: str | Callable[..., Any] | None) -> EnvCreator:
    """The creator that `env` names: registered name, import path, gymnasium id or "module:id", class or callable.

    Raises `MissingEnvError` for None and `UnknownEnvError` for a name nothing is known by.
    """
    if env is None:
        raise MissingEnvError
    if not isinstance(env, str):
        return _of_callable(env)
    if env in _registered:
        return _registered[env]
    module, colon, attribute = env.partition(":")
    if colon and all(part.isidentifier() for part in attribute.split(".")):
        return _of_callable(_import(env, module, attribute))
    return _of_gym_id(env)


@contextmanager
def naming_what_failed(config: EnvRunnerConfig, index: int) -> Iterator[None]:
    """What a creator raises within becomes an `EnvError` that says which env it was; errors of our own stay."""
    try:
        yield
    except HeadraceError:
        raise
    except Exception as error:
        what = f"env {index} ({config.env!r}) could not be built"
        raise EnvError(f"{what}: {type(error).__name__}: {message_of(error)}; check env and env_config") from error


def build_env(creator: EnvCreator, context: EnvContext) -> gym.Env[Any, Any]:
    """One env, sure to be a gymnasium one; whatever the creator raises passes through."""
    env = creator(context)
    if "dm_env" in sys.modules:
        # Loaded by whoever built such an env, and not by us: dm_env is no dependency.
        from headrace.workers.envs.dm_envs import adapt

        env = adapt(env)
    seen = f"{type(env).__module__}.{type(env).__qualname__}"
    if hasattr(getattr(env, "unwrapped", env), "possible_agents"):  # gymnasium's wrappers hide it
        expected = "a gymnasium.Env of one agent; one of several needs MultiAgentEnvRunner and policies"
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
        raise UnknownEnvError(env, str(error)) from error
    if not callable(found):
        raise UnknownEnvError(env, f"{attribute} is a {type(found).__name__} and cannot be called")
    return found  # type: ignore[no-any-return]


def gym_spec(env_id: str) -> EnvSpec:
    """What gymnasium knows of an id, also of "module:id", where that module registers it; raises `UnknownEnvError`."""
    module, colon, own_id = env_id.partition(":")
    try:
        if colon:
            import_module(module)
        return gym.spec(own_id if colon else env_id)
    except (gym.error.Error, ImportError, ValueError) as error:
        raise UnknownEnvError(env_id, str(error)) from error


def _of_gym_id(env_id: str) -> EnvCreator:
    spec = gym_spec(env_id)
    # The rows of each poll are checked by Headrace itself, and only one of the two checkers should be paid for.
    return lambda context: gym.make(spec, disable_env_checker=True, **context)


def _of_callable(target: Callable[..., Any]) -> EnvCreator:
    """A function or class gets the context if it takes an argument that could be it, else the config's items.

    So PettingZoo's `env(**kwargs)` can be named as it is.
    """
    takes_context = _takes_context(target) if inspect.isclass(target) else _takes_an_argument(target)
    return target if takes_context else lambda context: target(**context)


def _takes_an_argument(function: Callable[..., Any]) -> bool:
    """Whether one may be given without its name, as far as can be told."""
    try:
        kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    except ValueError:  # of some that are written in C
        return True
    by_name = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    return not kinds <= by_name


def _takes_context(cls: type) -> bool:
    positional = [
        p for p in inspect.signature(cls).parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return bool(positional) and (
        positional[0].name in _CONTEXT_NAMES or positional[0].default is inspect.Parameter.empty
    )
