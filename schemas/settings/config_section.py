"""The base class of all sections of the configuration."""

from __future__ import annotations

import ast
import sys
from functools import cache
from inspect import cleandoc, get_annotations, getsource
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict

FIELDS = "\n\nFields:\n\n"
"""Heading in a section's docstring between its own text and the fields."""


class ConfigSection(BaseModel):
    """A frozen part of the configuration, checked when built. Code gets the parts it uses, never the whole tree.

    The text below a field becomes its description. The docstring of each section ends with its fields: type, default,
    meaning. So `help` shows them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        texts = _texts_in(cls.__module__).get(cls.__name__, {})
        for name, field in cls.model_fields.items():
            field.description = texts.get(name, field.description)
        kinds: dict[str, str] = {}
        for base in cls.__mro__:  # own fields come first
            kinds = {**kinds, **{name: kind for name, kind in get_annotations(base).items() if name not in kinds}}
        fields = [_describe(cls, name, kind) for name, kind in kinds.items() if name in cls.model_fields]
        cls.__doc__ = cleandoc(cls.__doc__ or "") + FIELDS + "\n".join(fields)


@cache  # pydantic's own `use_attribute_docstrings` reads the module for each class, which a start would wait for
def _texts_in(module: str) -> dict[str, dict[str, str]]:
    """Return by class the text below each field; none for a module without source."""
    try:
        tree = ast.parse(getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    found: dict[str, dict[str, str]] = {}
    for section in [node for node in tree.body if isinstance(node, ast.ClassDef)]:
        for field, text in pairwise(section.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found.setdefault(section.name, {})[name] = " ".join(words.split())
    return found


def meaning_of(section: type[BaseModel], name: str) -> str:
    """Return what the field `name` means: its description, or that of the section that it holds."""
    field = section.model_fields[name]
    holds = field.annotation
    if field.description is None and isinstance(holds, type) and issubclass(holds, ConfigSection):
        return (holds.__doc__ or "").partition("\n")[0]
    return field.description or ""


def _describe(section: type[BaseModel], name: str, kind: str) -> str:
    default = section.model_fields[name].default
    value = "" if isinstance(default, BaseModel) else f" = {default!r}"
    return f"    {name}: {kind}{value}\n        {meaning_of(section, name)}"
