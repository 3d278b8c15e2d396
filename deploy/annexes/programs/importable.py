"""The name by which workers import a function or class of the program that starts their fleet."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.schemas.errors import ConfigError, absolute

MAIN = "__main__"


def import_name(target: Callable[..., Any], key: str) -> tuple[str, Path | None]:
    """Return "package.module:name" of a function or class, and the folder to import it from; None: any Python has it.

    One of `__main__` gets the name of the program's file. Raises `ConfigError` for `key` where another process cannot
    import it: a lambda, a closure, an instance, or what was defined in a notebook's cell.
    """
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        raise _not_importable(
            target, key, "only a function or class at the top of a module has a name that they can import"
        )
    if module == MAIN:
        module = _name_of_main(target, key)
    home = sys.modules[MAIN if module not in sys.modules else module]
    file = getattr(home, "__file__", None)
    if file is None:
        return f"{module}:{name}", None
    folder = absolute(file).parents[module.count(".") + (Path(file).stem == "__init__")]
    return f"{module}:{name}", None if folder.is_relative_to(sys.prefix) else folder


def _name_of_main(target: Callable[..., Any], key: str) -> str:
    """Return the name under which another process imports this program's file."""
    main = sys.modules[MAIN]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # started with `python -m`
        return str(spec.name)
    file = Path(getattr(main, "__file__", "") or "")
    if file.suffix == ".py" and file.stem.isidentifier() and file.is_file():
        return file.stem
    where = f"the program's file, {file}, has no name for an import" if file.name else "it stands in no file"
    raise _not_importable(target, key, f"{where}; in a notebook, `%%writefile my_code.py` saves a cell as a module")


def _not_importable(target: Any, key: str, why: str) -> ConfigError:
    advice = "give a function or class of a module, or its name as 'package.module:name'"
    return ConfigError(f"the workers cannot import {target!r:.120}: {why}; {advice}", key=key)
