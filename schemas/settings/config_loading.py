"""Loading of a configuration: defaults < file < environment (`HEADRACE_SECTION__KEY`) < flags.

`load_config` also returns the origin of each value. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import logging
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from headrace.schemas.basics.printable import brief
from headrace.schemas.basics.run_files import read_regular, read_stream
from headrace.schemas.errors import ConfigError
from headrace.schemas.frames.wire import DEFAULT_LIMITS, is_deeper
from headrace.schemas.settings import ENV_PREFIX
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.nearest_names import REMOVED, nearest_name

log = logging.getLogger(__name__)

_AS_JSON = {
    "dict_type": """a table, as JSON such as '{"key": 1}'""",
    "list_type": """a list, as JSON such as '["a", "b"]'""",
}
"""Form of a value that text cannot give, by pydantic's name of the error."""

_LARGEST_FILE = 16 << 20
_OF_RUNS = ("settings.json", "config.json")
"""Names of the files in which a run keeps its settings."""

_STREAM_S = 10.0
_STREAMS: dict[Path, bytes] = {}
"""Contents of the pipes that `take_stream` has read. A pipe gives its content once."""

Origins = dict[str, str]
"""Dotted key -> origin of its value, for keys that are not at their default."""


def load_config(
    path: Path | None = None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[FleetConfig, Origins]:
    """Return the configuration, and the origin of every value that is not the default.

    `flags` maps dotted keys ("sampling.num_envs") to values. Raises `ConfigError`.
    """
    values: dict[str, Any] = {}
    origins: Origins = {}
    if path is not None:
        _merge(values, origins, _read_file(path), str(path))
    for key, value in values_of_environment(environ).items():
        _set(values, origins, key, value, f"environment {ENV_PREFIX}{key.replace('.', '__').upper()}")
    for key, value in (flags or {}).items():
        _set(values, origins, key, value, "flag")
    return build_config(values, origins), origins


def take_stream(path: Path) -> None:
    """Read the pipe or device at `path` to its end, for `load_config` to take it as a file. Read it once.

    Call it only for a path that the user names: another one may hold the reader for 10 s. Raises `ConfigError`.
    """
    try:
        if path not in _STREAMS:
            _STREAMS[path] = read_stream(path, _LARGEST_FILE + 1, _STREAM_S)
    except OSError as error:
        raise ConfigError(f"the pipe cannot be read: {error.strerror}", source=str(path)) from error


def build_config(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> FleetConfig:
    """Build the configuration from `values` (sections of keys).

    Raises `ConfigError` for the first thing that is wrong.
    """
    _check_depth(values, origins or {})
    try:
        config = FleetConfig.model_validate(values)
    except ValidationError as error:
        first: Any = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        source = (origins or {}).get(key)
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"unknown key{_nearest(key)}", key=key, source=source) from error
        if first["type"] == "value_error":
            raise ConfigError(str(first["ctx"]["error"]), key=key, source=source) from error
        if isinstance(first["input"], str) and first["type"] in _AS_JSON:
            said = f"should be {_AS_JSON[first['type']]}, got {first['input']!r:.80}"
            raise ConfigError(said, key=key, source=source) from error
        said = first["msg"].replace("Input should", "should").replace("String should", "should")
        got = "" if key == "redis.url" else f", got {brief(first['input'])}"  # it may have a password
        raise ConfigError(f"{said}{got}", key=key, source=source) from error
    for key, value in by_key(config.model_dump()).items():
        if (odd := _beyond_json(value)) is not None:
            raise ConfigError(odd, key=key, source=(origins or {}).get(key))
    return config


def _check_depth(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a value that is nested deeper than the messages which carry it may be."""
    most = DEFAULT_LIMITS.header_depth - 2  # settings.json has it in two tables
    for key, value in by_key(values).items():
        if is_deeper([value], most):
            raise ConfigError(f"is nested deeper than {most - 1} levels", key=key, source=origins.get(key))


def _beyond_json(value: Any) -> str | None:
    """Name, in words, a part of `value` that JSON cannot carry to other processes unchanged.

    None when there is none.
    """
    if isinstance(value, dict):
        return next(filter(None, map(_beyond_json, value.values())), None)
    if isinstance(value, list | tuple):
        return next(filter(None, map(_beyond_json, value)), None)
    if isinstance(value, float) and not math.isfinite(value):
        return f"should be a finite number, got {value}"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"should be an integer of at most 64 bits, got {brief(value, 40)}"
    if value is not None and not isinstance(value, bool | int | float | str):
        return f"should be made of tables, lists, text, numbers and booleans, got a {type(value).__name__}"
    return None


def known_keys() -> dict[str, Any]:
    """Return every dotted key with its default."""
    return by_key(FleetConfig().model_dump())


def by_key(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in the sections of `tree` by dotted key."""
    sections = {name: content for name, content in tree.items() if isinstance(content, Mapping)}
    return {f"{name}.{key}": value for name, content in sections.items() for key, value in content.items()}


def _nearest(key: str) -> str:
    known = list(known_keys()) if "." in key else list(FleetConfig.model_fields)
    if "." in key and key.rpartition(".")[2] in REMOVED:
        return "; an earlier version had it, and this one has no such setting; leave it out"
    elsewhere = [name for name in known if "." in key and name.partition(".")[2] == key.partition(".")[2]]
    near = nearest_name(key, elsewhere or known, cutoff=0.0 if elsewhere else 0.75)
    return f"; did you mean {near}?" if near else "; `headrace up --print-config` lists all keys"


def _read_file(path: Path) -> dict[str, Any]:
    """Read a TOML file, or JSON by its suffix. It may come from a stranger's run.

    `up` gives its children the resolved configuration as JSON, which has null.
    """
    try:
        content = _STREAMS[path] if path in _STREAMS else read_regular(path, _LARGEST_FILE + 1)
        if len(content) > _LARGEST_FILE:
            raise ConfigError(f"the file has more than {_LARGEST_FILE >> 20} MiB", source=str(path))
        text = content.decode("utf-8-sig")
        tree = orjson.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}", source=str(path)) from error
    except RecursionError as error:
        raise ConfigError("is nested too deeply", source=str(path)) from error
    except ValueError as error:  # of a large int too
        language = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"is not {language}: {error}", source=str(path)) from error
    if not isinstance(tree, dict):
        raise ConfigError("is not an object of sections", source=str(path))
    _check_sizes(tree, str(path))
    if path.name in _OF_RUNS:
        _leave_out_unknown(tree, path)
    return tree


def _leave_out_unknown(tree: dict[str, Any], path: Path) -> None:
    """Leave out what only other versions have in a run's own file, so that the run can be resumed."""
    known, unknown = known_keys(), list[str]()
    for section, content in list(tree.items()):
        for name in [name for name in content if f"{section}.{name}" not in known] if isinstance(content, dict) else ():
            unknown.append(f"{section}.{name}")
            del content[name]
        if section not in FleetConfig.model_fields and not content:
            del tree[section]
    if unknown:
        log.warning("%s: settings of another version have no effect: %s", path, ", ".join(unknown))


def _check_sizes(tree: Mapping[str, Any], source: str) -> None:
    """Raise `ConfigError` for too many sections, keys or entries: pydantic makes an error for each wrong one."""
    most = DEFAULT_LIMITS.names
    for key, part in (("", tree), *tree.items(), *by_key(tree).items()):
        if isinstance(part, dict | list) and len(part) > most:
            raise ConfigError(f"has {len(part):,} entries, and at most {most:,}", key=key or None, source=source)


def _merge(values: dict[str, Any], origins: Origins, tree: Mapping[str, Any], source: str) -> None:
    for section, content in tree.items():
        if not isinstance(content, Mapping):
            raise ConfigError(f"stands outside any [section]{_nearest(section)}", key=section, source=source)
        values.setdefault(section, {})  # this way an unknown section is reported even when it is empty
        for key, value in content.items():
            _set(values, origins, f"{section}.{key}", value, source)


def _set(values: dict[str, Any], origins: Origins, dotted: str, value: Any, source: str) -> None:
    """Note a value under "section.key", or inside a table of free names: "module.config.hidden"."""
    section, _, key = dotted.partition(".")
    table = values.setdefault(section, {})
    field, *inside = key.split(".")
    if inside and isinstance(known_keys().get(f"{section}.{field}"), dict):
        dotted = f"{section}.{field}"
        for name in (field, *inside[:-1]):
            known = table.get(name)
            table[name] = table = dict(known) if isinstance(known, Mapping) else {}
        table[inside[-1]] = value
    else:
        table[key] = value
    origins[dotted] = source


def values_of_environment(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read HEADRACE_SAMPLING__NUM_ENVS=8 as {"sampling.num_envs": "8"}; None: from this process's environment."""
    found = {}
    for name, text in (os.environ if environ is None else environ).items():
        section, double, key = name.removeprefix(ENV_PREFIX).lower().partition("__")
        if name.startswith(ENV_PREFIX) and double:
            found[f"{section}.{key}"] = parse_text(text)
    return found


def parse_text(text: str) -> Any:
    """Parse a value that a person typed: JSON for tables, lists and null; else text, which each field reads itself."""
    if not text.startswith(("{", "[")) and text != "null":
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
