"""`--print-config`: every value and where it came from, as TOML that can be used as a config file."""

from __future__ import annotations

import re
from typing import Any

import orjson

from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import Origins
from headrace.schemas.settings.redis_url import without_password

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def print_config(config: FleetConfig, origins: Origins) -> str:
    """Return the configuration as TOML, with each value's origin behind it. A Redis password is not shown."""
    lines: list[str] = []
    for section, values in config.model_dump(mode="json").items():
        lines += ["", f"[{section}]"]
        for key, value in values.items():
            if (section, key) == ("redis", "url") and value:
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
    return orjson.dumps(value).decode()


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else orjson.dumps(key).decode()
