"""Names that stand for code: "package.module:attribute". They come from a config file or a flag, never from a peer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.schemas.basics.stop_event import raise_stop
from headrace.schemas.errors import ConfigError, ConnectorError, HeadraceError, words_of

AT_THE_TOP = 'define it at the top of its file, not below `if __name__ == "__main__":`'


_EXTRAS = {
    "stable_baselines3": "sb3",
    "tensordict": "torchrl",
    "envpool": "envpool",
    "ale_py": "envs",
    "minigrid": "envs",
}
"""The extra that brings a package which a named module may import."""


def where_to_find(error: ImportError) -> str:
    """Return what to do about a module that cannot be imported: install an extra, or look at the path."""
    extra = _EXTRAS.get((error.name or "").partition(".")[0])
    return f"pip install 'headrace[{extra}]'" if extra else "check PYTHONPATH and the folder you run in"


def check_package(user: str, package: str, extra: str, key: str = "") -> None:
    """Import a package that `user` needs and that `extra` brings.

    Raises `ConfigError`: it is not installed, or it cannot be imported beside the other packages.
    """
    try:
        importlib.import_module(package)
    except Exception as error:
        advice = f": pip install 'headrace[{extra}]'"
        if not (isinstance(error, ModuleNotFoundError) and error.name == package):
            advice = f", which cannot be imported: {words_of(error)}; install a version that can"
        raise ConfigError(f"{user} needs {package}{advice}", key=key) from error


def load_object(path: str, key: str) -> Any:
    """Import the object at "package.module:attribute". `key` names the setting it came from.

    Raises `ConfigError` saying which half of the path cannot be found, with the ImportError as its cause. Any other
    error that the module raises during the import is the user's own and passes through.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute or module_name.startswith("."):
        raise ConfigError(f"{path!r} is not of the form 'package.module:name'", key=key)
    try:
        value: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"module {module_name!r} cannot be imported ({error}); {where_to_find(error)}", key=key
        ) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"module {module_name!r} has no {attribute!r}; {AT_THE_TOP}", key=key)
        value = getattr(value, part)
    return value


def load_factory(spec: str | Mapping[str, Any], key: str) -> Callable[[], Any]:
    """Return the factory of the object that a setting describes.

    A setting is "package.module:factory", called without arguments, or a table {build = "package.module:factory",
    config = {...}}, whose `config` are keyword arguments.

    Raises `ConfigError` for another table, for a name that cannot be found, and for an object that cannot be called.
    """
    if isinstance(spec, str):
        return _callable(spec, key)
    path, config = spec.get("build"), spec.get("config", {})
    if not isinstance(path, str) or not isinstance(config, Mapping) or spec.keys() - {"build", "config"}:
        raise ConfigError(
            f"{spec!r:.120} should be a table of build, a 'package.module:factory', and its config", key=key
        )
    return partial(_callable(path, key), **config)


def _callable(path: str, key: str) -> Callable[..., Any]:
    factory: Any = load_object(path, key)
    if not callable(factory):
        raise ConfigError(f"{path!r} is a {type(factory).__name__} and cannot be called", key=key)
    built: Callable[..., Any] = factory
    return built


def build_piece(spec: Any, key: str, kind: type) -> Any:
    """Build a connector from `spec`: a factory, or a setting that `load_factory` takes.

    The result is sure to be a `kind`, a runtime-checkable protocol. Raises `ConfigError` for a factory that builds
    something else, `ConnectorError` when the factory raises.
    """
    factory = load_factory(spec, key) if isinstance(spec, str | Mapping) else spec
    if not callable(factory):
        raise ConfigError(f"{spec!r:.80} is no connector, factory of one, or 'package.module:factory'", key=key)
    try:
        built = factory()
    except HeadraceError:
        raise
    except BaseException as error:
        raise_stop(error)
        raise ConnectorError(f"{spec!r:.80} of {key}", words_of(error)) from error
    if not isinstance(built, kind):
        raise ConfigError(f"{spec!r:.80} gave a {type(built).__name__}, not a Connector", key=key)
    return built
