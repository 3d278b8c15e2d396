"""Names that stand for code: "package.module:attribute", from a config file or a flag and from nowhere else."""

from __future__ import annotations

import importlib
from typing import Any

from headrace.schemas.errors import ConfigError


def load_object(path: str, key: str) -> Any:
    """The object at "package.module:attribute". `key` names the setting it came from.

    Raises `ConfigError` saying which half of the path cannot be found, with the ImportError as its cause. Any other
    error that the module raises while it is imported is the user's own and passes through.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute or module_name.startswith("."):
        raise ConfigError(f"{path!r} is not of the form 'package.module:name'", key=key)
    try:
        value: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"module {module_name!r} cannot be imported ({error}); check PYTHONPATH", key=key) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise ConfigError(f"module {module_name!r} has no {attribute!r}", key=key)
        value = getattr(value, part)
    return value
