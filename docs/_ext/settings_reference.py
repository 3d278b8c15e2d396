"""The reference of settings, from the schema: key, type, default, unit, meaning and environment variable."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
import orjson
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.schemas.settings import ENV_PREFIX
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_section import FIELDS, meaning_of
from headrace.schemas.settings.sampling_settings import PolicySettings
from headrace.workers.config import EnvRunnerConfig

SAMPLE_FILE = Path(__file__).parents[2] / "deploy" / "fleet.toml"
_UNITS = {"_s": "s", "_ms": "ms", "_mb": "MB", "_bytes": "bytes"}
_UNIT_AT_START = re.compile(r"^(s|MB|bytes|ms);? ")


@dataclass(frozen=True)
class Setting:
    """One key of the configuration."""

    key: str
    type: str
    default: str
    unit: str
    meaning: str

    @property
    def variable(self) -> str:
        """Return the environment variable that sets it."""
        return ENV_PREFIX + self.key.replace(".", "__").upper()


def settings_as_markdown() -> str:
    """Return all sections, a heading and a table each."""
    parts = []
    for name, field in FleetConfig.model_fields.items():
        section = _model(field)
        parts += [
            f"## [{name}]",
            "",
            _summary(section),
            "",
            *_table(settings(name)),
            "",
        ]
    parts += ["## One of several policies", "", _summary(PolicySettings), ""]
    parts += [
        "Each value of `sampling.policies` is a table of these keys.",
        "",
        *_table(list(_settings_of("", PolicySettings, {}))),
    ]
    return "\n".join(parts)


def runner_arguments_as_markdown() -> str:
    """Return a table of the arguments that `EnvRunnerConfig` has beside `[sampling]`, or that mean more there."""
    rows = ["| argument of `EnvRunnerConfig` | default | is |", "|---|---|---|"]
    for name in EnvRunnerConfig.__annotations__:
        field = EnvRunnerConfig.model_fields[name]
        rows.append(
            f"| `{name}` | {_default(field)} | {_sentence(meaning_of(EnvRunnerConfig, name))} |"
        )
    return "\n".join(rows)


def _summary(section: type[BaseModel]) -> str:
    """Return the docstring of a section without its fields."""
    return (section.__doc__ or "").partition(FIELDS)[0]


def settings(section: str) -> list[Setting]:
    """Return the keys of a section in the order of the schema."""
    return list(
        _settings_of(
            f"{section}.",
            _model(FleetConfig.model_fields[section]),
            _sample_comments(section),
        )
    )


def _settings_of(
    prefix: str, model: type[BaseModel], comments: Mapping[str, str]
) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        comment = comments.get(name, "")
        unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
        meaning = field.description or _UNIT_AT_START.sub("", comment)
        yield Setting(
            key=prefix + name,
            type=_type(field.annotation) + _bounds(field),
            default=_default(field),
            unit=unit,
            meaning=meaning,
        )


def _table(rows: list[Setting]) -> Iterator[str]:
    """One item a key: a table of six columns fits no phone."""
    for row in rows:
        unit = f", in {row.unit}" if row.unit else ""
        variable = f" Variable: `{row.variable}`." if "." in row.key else ""
        yield (
            f'- <a id="{row.key}"></a>`{row.key}` ({row.type}{unit}): {_sentence(row.meaning)}'
            f" Default: {row.default}.{variable}"
        )


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{text[:1].upper()}{text[1:]}." if not text.startswith('"') else f"{text}."


def _model(field: FieldInfo) -> type[BaseModel]:
    assert isinstance(field.annotation, type)
    assert issubclass(field.annotation, BaseModel)
    return field.annotation


def _type(annotation: Any) -> str:
    """Return a type in words, as a person who writes TOML would say it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{orjson.dumps(value).decode()}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(
            _type(argument) for argument in arguments if argument is not types.NoneType
        )
    if origin is list:
        return (
            f"list of ({_type(arguments[0])})"
            if " or " in _type(arguments[0])
            else f"list of {_type(arguments[0])}"
        )
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    names = {bool: "boolean", int: "integer", float: "number", str: "text", Any: "any"}
    return names[annotation]


def _bounds(field: FieldInfo) -> str:
    signs = {
        annotated_types.Ge: "≥",
        annotated_types.Gt: ">",
        annotated_types.Le: "≤",
        annotated_types.Lt: "<",
    }
    parts = []
    for rule in field.metadata:
        for kind, sign in signs.items():
            if isinstance(rule, kind):
                bound = getattr(rule, kind.__name__.lower())
                parts.append(
                    f"{sign} {bound:,}" if isinstance(bound, int) else f"{sign} {bound:g}"
                )
    return f", {' and '.join(parts)}" if parts else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "absent"
    return f"`{orjson.dumps(value).decode()}`"


def _sample_comments(section: str) -> dict[str, str]:
    """Key -> its comment in the sample file, also of keys that are commented out."""
    text = SAMPLE_FILE.read_text(encoding="utf-8")
    matched = re.search(rf"^\[{section}\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    assert matched, section
    found: dict[str, str] = {}
    key = None
    for line in matched[1].splitlines():
        if opening := re.match(r"(?:# )?(\w+) = .*?  ?# (.*)", line):
            key = opening[1]
            found[key] = opening[2]
        elif key and (more := re.match(r"(?:#)? {8,}# (.*)", line)):
            found[key] += " " + more[1]
    return found
