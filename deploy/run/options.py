"""The settings that the options of a command name, and the one configuration and run directory that they give."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from headrace.deploy.run.run_dir import newest_run
from headrace.deploy.run.several_brokers import at_broker
from headrace.deploy.terminal.std_streams import say
from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import Origins, load_config, take_stream
from headrace.schemas.settings.redis_url import read_redis_url

RECIPES = Path(__file__).parents[1] / "recipes"
"""Configurations that were tuned for one env each, and came with the package."""


def recipes() -> list[str]:
    """Return the names of the recipes, sorted."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def config_file(path: Path | None) -> Path | None:
    """Return the file that `--config` means: the one at `path`, else the recipe of that name.

    A pipe, such as `/dev/stdin`, is read here. Raises `ConfigError` when there is neither, or the pipe does not end.
    """
    try:
        if path is None or (path.exists() and not path.is_dir()):
            if path is not None and not path.is_file():
                take_stream(path)
            return path
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", key="--config") from error
    if path.name in recipes() and path == Path(path.name):
        return RECIPES / f"{path.name}.toml"
    raise ConfigError(f"{path} is neither a file nor a recipe; the recipes are {', '.join(recipes())}", key="--config")


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings that a command line names: a file, `--set`, and flags by dotted name. None was not given.

    `allow`: code that may be built though only a file that the user did not name has it; None for a command that builds
    no such code.
    """

    config: Path | None = None
    sets: Iterable[str] | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    allow: Iterable[str] | None = None

    def resolve(self) -> tuple[FleetConfig, Origins]:
        """Resolve defaults < file < environment < `--set` < flags. Raises `ConfigError`."""
        given = {key: value for key, value in self.flags.items() if value is not None}
        return load_config(self.config, {**parse_sets(self.sets or ()), **given})

    def run_dir(self) -> Path:
        """Return the run directory of a command; see `chosen_run`."""
        return chosen_run(self.resolve()[0])

    def with_flags(self, flags: Mapping[str, Any]) -> Asked:
        """Return the same with other or more flags."""
        return replace(self, flags={**self.flags, **flags})


def chosen_run(config: FleetConfig) -> Path:
    """Return the run directory of a command: the configured one, else the newest run, which is printed on stderr.

    Raises `FleetError` when there is none.
    """
    if config.fleet.run_dir:
        return Path(config.fleet.run_dir)
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

    Raises the errors of `Asked.resolve` and `at_broker`.
    """
    config, _ = asked.resolve()
    if config.broker.count == 1:
        return [config]
    chosen = range(config.broker.count) if config.broker.index is None else [config.broker.index]
    return [asked.with_flags(at_broker(config, index)).resolve()[0] for index in chosen]


def describe_origin(config: Path | None, origins: Origins) -> str:
    """Return, in a few words, where the configuration came from."""
    sources = [str(config)] if config else ["defaults"]
    flags = sum(source == "flag" for source in origins.values())
    environment = sum(source.startswith("environment") for source in origins.values())
    sources += [f"{environment} from the environment"] if environment else []
    sources += [f"{flags} flag{'s' if flags > 1 else ''}"] if flags else []
    return " + ".join(sources)


def named_redis(text: str, key: str = "--redis-url") -> str:
    """Return the URL of the Redis that an option names: the text itself, or that in a file. Raises `ConfigError`."""
    try:
        return read_redis_url(text)
    except ValueError as error:
        raise ConfigError(str(error), key=key) from None


def parse_sets(sets: Iterable[str]) -> dict[str, Any]:
    """Parse ["sampling.num_envs=8"] as {"sampling.num_envs": 8}; a value is JSON if it parses as JSON, else text."""
    found: dict[str, Any] = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or "." not in key:
            raise ConfigError(f"{text!r} is not SECTION.KEY=VALUE", source="--set")
        try:
            found[key.strip()] = orjson.loads(value)
        except orjson.JSONDecodeError:
            found[key.strip()] = value
    return found
