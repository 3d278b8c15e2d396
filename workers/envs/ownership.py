"""Refuses an env object that two lanes would step in turns: each call of a creator must build a new env."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from headrace.schemas.errors import EnvContractError


class EnvLife:
    """The time in which a lane owns its env: until `is_over` is set, or until this object is dropped."""

    is_over = False
    has_env = False
    """False until `claim`: the env's constructor has not returned, or has failed."""


_owners: dict[int, tuple[weakref.ref[Any], weakref.ref[EnvLife], int]] = {}
"""Id of an env without its wrappers -> the env, and the life and index of the newest lane that owns or owned it."""


def claim(env: Any, life: EnvLife, index: int, *, recreated: bool) -> None:
    """Note lane `index` as the owner of `env`.

    Raises `EnvContractError` if another lane of this process owns it, or if a `recreated` env is not a new object.
    Objects that cannot be referenced weakly are not compared.
    """
    base = getattr(env, "unwrapped", env)
    key = id(base)
    known, owner, other = _owners.get(key, (None, None, index))
    if known is not None and owner is not None and known() is base:
        before = owner()
        is_taken = before is not None and not before.is_over and (before is not life or other != index)
        if is_taken or (recreated and before is not life):
            same = "that it had before" if recreated else "of another runner, which is open"
            raise _shared(base, index, same if other == index else f"of env {other}")
    life.is_over, life.has_env = False, True
    try:
        _owners[key] = weakref.ref(base, partial(_forget, key)), weakref.ref(life), index
    except TypeError:
        return


def free(life: EnvLife) -> None:
    """Collect garbage if a closed env of `life` may still exist, in a cycle of references.

    An env without a `close` frees its port or its file only then. So does one whose constructor failed half-way.
    """
    if not life.has_env or any(owner() is life for _, owner, _ in tuple(_owners.values())):
        gc.collect()


def refuse_twice(envs: Sequence[Any]) -> None:
    """Raise `EnvContractError` if two of `envs`, which are of one vector, are the same object below wrappers."""
    seen: dict[int, int] = {}
    for index, env in enumerate(envs):
        base = getattr(env, "unwrapped", env)
        if env is not None and seen.setdefault(id(base), index) != index:
            raise _shared(base, index, f"of env {seen[id(base)]}")


def _forget(key: int, _: object) -> None:
    _owners.pop(key, None)


def _shared(base: Any, index: int, whose: str) -> EnvContractError:
    name = f"{type(base).__module__}.{type(base).__qualname__}"
    seen = f"the one {whose} ({name}); build a new env in each call of the creator"
    return EnvContractError(f"env {index}", seen, "an object of its own")
