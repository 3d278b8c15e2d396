"""The settings that the options of a command name, and the one configuration and run directory that they give."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from headrace.deploy.run.run_dir import newest_run
from headrace.deploy.run.several_brokers import at_broker
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import known_keys, load_config, take_stream, values_of_environment
from headrace.schemas.settings.nearest_names import nearest_name
from headrace.schemas.settings.redis_url import is_file, read_redis_url, without_password

RECIPES = Path(__file__).parents[1] / "recipes"
"""Configurations that were tuned for one env each, and came with the package."""
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def recipes() -> list[str]:
    """Return the names of the recipes, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def config_file(path: Path | None) -> Path | None:
    """Return the file that `--config` means: the one at `path`, else the recipe of that name.

    A pipe, such as `/dev/stdin`, is read here. Raises `ConfigError` when there is neither, or the pipe does not end.
    """
    if path is None:
        return None
    try:
        if path.stat() and not path.is_dir():
            if not path.is_file():
                take_stream(path)
            return path
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", key="--config") from error
    if path.name in recipes() and path == Path(path.name):
        return RECIPES / f"{path.name}.toml"
    raise ConfigError(f"{path} is neither a file nor a recipe; the recipes are {', '.join(recipes())}", key="--config")


@dataclass(frozen=True)
class Asked:
    """The settings that a command line names: a file, `--set`, and flags by dotted name. None was not given.

    `allow`: code that may be built though only a file that the user did not name has it; None for a command that builds
    no such code.
    """

    config: Path | None = None
    sets: Iterable[str] | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    allow: Iterable[str] | None = None

    @cached_property
    def resolved(self) -> tuple[FleetConfig, dict[str, str]]:
        """Return defaults < file < environment < `--set` < flags, and where each value is from.

        File and environment are read once. Raises `ConfigError`.
        """
        return load_config(self.config, self._line)

    @cached_property
    def _line(self) -> dict[str, Any]:
        flags = {key: value for key, value in self.flags.items() if value is not None}
        return {**parse_sets(self.sets or ()), **flags}

    def named(self, key: str) -> str:
        """Return, as text, what the user gives for a setting, apart from the file of a run; "" for nothing.

        It is not validated, unless the user names a file: a process may have to find its run before it resolves. Raises
        `ConfigError`.
        """
        if self.config is not None:
            return str(self.settings.value_of(key))
        return str({**values_of_environment(), **self._line}.get(key) or "")

    @property
    def settings(self) -> FleetConfig:
        """Return the configuration. Raises `ConfigError`."""
        return self.resolved[0]

    @property
    def origin(self) -> str:
        """Return, in a few words, where the configuration came from."""
        sources = list(self.resolved[1].values())
        flags, environment = sources.count("flag"), sum(source.startswith("environment") for source in sources)
        words = [str(self.config or "defaults")]
        words += [f"{environment} from the environment"] if environment else []
        words += [f"{flags} flag{'s' if flags > 1 else ''}"] if flags else []
        return " + ".join(words)

    def run_dir(self) -> Path:
        """Return the run directory of a command; see `chosen_run`."""
        return chosen_run(self.settings.fleet.run_dir)

    def with_flags(self, flags: Mapping[str, Any]) -> Asked:
        """Return the same with other or more flags."""
        return replace(self, flags={**self.flags, **flags})


def chosen_run(run_dir: str) -> Path:
    """Return the run directory of a command: the configured one, else the newest run, which is printed on stderr.

    Raises `FleetError` when there is none.
    """
    if run_dir:
        return Path(run_dir)
    run = newest_run()
    say(f"run directory: {run}, the newest in {run.parent}/", sys.stderr)
    return run


def named_fleet(config: FleetConfig) -> tuple[str, str] | None:
    """Return (Redis URL, fleet id) of the fleet that the settings name, if they name both.

    This finds a fleet without `headrace up`, whose roles another engine starts, by its fleet.toml alone.
    """
    return (config.redis.url, config.fleet.fleet_id) if config.redis.url and config.fleet.fleet_id else None


def resolve_each(asked: Asked) -> list[FleetConfig]:
    """Return the configuration as the processes of each broker have it; of all brokers, or that of broker.index.

    Raises the errors of `Asked.resolved` and `at_broker`.
    """
    config = asked.settings
    if config.broker.count == 1:
        return [config]
    chosen = range(config.broker.count) if config.broker.index is None else [config.broker.index]
    return [at_broker(config, index) for index in chosen]


def named_redis(text: str, key: str = "--redis-url") -> str:
    """Return what `read_redis_url` makes of an option. Raises `ConfigError`."""
    try:
        return read_redis_url(text)
    except ValueError as error:
        raise ConfigError(str(error), key=key) from None


def parse_sets(sets: Iterable[str]) -> dict[str, Any]:
    """Parse ["sampling.num_envs=8"] as {"sampling.num_envs": 8}; a value is JSON if it parses as JSON, else text.

    Numbers and booleans stay text for a setting that is text, such as a group of the name 4711.
    """
    found, known = dict[str, Any](), known_keys()
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or "." not in key:
            near = nearest_name(key.strip(), known, cutoff=0.6)
            hint = f"; did you mean {near}?" if near else ""
            raise ConfigError(f"{text!r} is not SECTION.KEY=VALUE{hint}", source="--set")
        try:
            parsed = orjson.loads(value)
        except orjson.JSONDecodeError:
            parsed = value
        is_text = isinstance(known.get(key.strip()), str) and isinstance(parsed, bool | int | float)
        found[key.strip()] = value.strip() if is_text else parsed
    return found


def as_toml(asked: Asked) -> str:
    """Return the configuration as TOML, with each value's origin behind it. A Redis password is not shown."""
    config, origins = asked.resolved
    lines: list[str] = []
    for section, values in config.model_dump(mode="json").items():
        lines += ["", f"[{section}]"]
        for key, value in values.items():
            if (section, key) == ("redis", "url") and value and not is_file(value):
                value = without_password(value)
            text = f"# {key} is not set" if value is None else f"{key} = {to_toml(value)}"
            lines.append(f"{text:<44}  # {origins.get(f'{section}.{key}', 'default')}")
    return "\n".join(lines[1:]) + "\n"


def to_toml(value: Any) -> str:
    """Return a JSON-like value as TOML on one line. None within a table is left out, since TOML has no null."""
    if isinstance(value, dict):
        pairs = (f"{_key(k)} = {to_toml(v)}" for k, v in value.items() if v is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(to_toml(v) for v in value) + "]"
    return orjson.dumps(value).decode().replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else to_toml(key)
