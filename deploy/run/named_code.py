"""The code that a settings file names, and the check of that code if the user did not name the file.

A file beside a checkpoint may come from anywhere. Code that it names is built only if one of these holds:

- it is Headrace's own: an entry of `OWN`, or a registered gymnasium id, for which nothing else is imported;
- the user's own Headrace wrote the file (`seal.py`);
- the user named it too, by a flag or in the environment;
- the user allowed it by its name, as "my_pkg:make_env".

A file that the user names with `--config` is the user's own: it is not judged here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.deploy.run.options import Asked, parse_sets
from headrace.deploy.run.seal import is_sealed
from headrace.schemas.errors import ConfigError
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import values_of_environment

_MODULES = "headrace.workers.modules"
_CONNECTORS = "headrace.workers.connectors"
OWN = frozenset(
    (
        *(f"{_MODULES}:{name}" for name in ("actor_critic", "lstm_actor_critic")),
        f"{_CONNECTORS}:AgentOneHot",
        f"{_CONNECTORS}:ClipActions",
        f"{_CONNECTORS}:FlattenObservations",
        f"{_CONNECTORS}:FrameStack",
        f"{_CONNECTORS}:MeanStd",
        f"{_CONNECTORS}:PreviousActionReward",
        f"{_CONNECTORS}:TimeOneHot",
        f"{_CONNECTORS}:UnsquashActions",
        "headrace.workers.agents.examples:two_carts",
        "headrace.workers.external.examples:CartPoles",
        "headrace.workers.external.examples:PairsOfCarts",
    )
)
"""The names of Headrace's own objects for settings. It is a list, and not a prefix: any module leads to any code, as in
"headrace.deploy.process.child:subprocess.run"."""

_OF_ANOTHER_ENV = ("GymV21Environment-", "GymV26Environment-")
"""Beginnings of registered ids whose env_config names another env, with the module to import for it."""
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w./-]*", re.ASCII)

_SHOWN = 5
_FLAGS, _LONGEST = 20, 200
"""Most `--allow` options that an error proposes, and their longest name."""
Named = tuple[str, str]
"""A setting's key, and a name in it."""


def with_found(asked: Asked, found: Path | None, *, with_loggers: bool = False) -> Asked:
    """Return the settings with the file at `found`, if the user names no file. None: there is no such file.

    `with_loggers`: the caller also builds the run's loggers. Raises `ConfigError`, also for names that are not to be
    built.
    """
    if asked.config is not None:
        return asked
    allow = tuple(asked.allow or ())
    _check_form(allow)
    if found is None:
        return asked
    asked = replace(asked, config=found)
    config = asked.settings
    if not is_sealed(found):
        known = {*OWN, *allow, *_texts([parse_sets(asked.sets or ()), asked.flags, values_of_environment()])}
        named = [one for one in names_in(config) if with_loggers or one[0] != "logging.loggers"]
        named = [(key, name) for key, name in named if name not in known]
        foreign = [one for one in named if one[0] != "sampling.env" or not _needs_no_import(one[1])]
        if foreign:
            raise _foreign_code_error(str(found), foreign)
    return asked


def _foreign_code_error(file: str, named: Sequence[Named]) -> ConfigError:
    """Return the error for a settings file, which a command found by itself, with names that nobody has allowed."""
    shown = ", ".join(f"{key} = {name!a:.100}" for key, name in named[:_SHOWN])
    more = len(named) - _SHOWN
    shown += f" and {more} more" if more > 0 else ""
    allowable = list(dict.fromkeys(name for _, name in named if _NAME.fullmatch(name)))
    short = [name for name in allowable if len(name) <= _LONGEST][:_FLAGS]
    others = f" and {rest} more" if (rest := len(allowable) - len(short)) else ""
    flags = " ".join(f"--allow {name}" for name in short) + others
    in_program = ", ".join(f'"{name}"' for name in short) + others
    advice = f"add {flags} (in a program allow=[{in_program}]), or give" if allowable else "give"
    return ConfigError(
        f"{file} names code that is not Headrace's own: {shown}; this user's `headrace up` did not write that file. If "
        f"you trust the code, {advice} your own settings with --config"
    )


def names_in(config: FleetConfig) -> Iterator[Named]:
    """Yield each name of code in `config`, after the key of its setting."""
    sampling = config.sampling
    yield "sampling.env", sampling.env
    for pipeline in ("env_to_module", "module_to_env"):
        yield from _of_pieces(f"sampling.{pipeline}", getattr(sampling, pipeline))
    for module_id, policy in (sampling.policies or {}).items():
        where = f"sampling.policies.{module_id}"
        if policy.build is not None:
            yield f"{where}.build", policy.build
        for pipeline in ("env_to_module", "module_to_env"):
            yield from _of_pieces(f"{where}.{pipeline}", getattr(policy, pipeline) or ())
    if isinstance(sampling.policy_mapping_fn, str):
        yield "sampling.policy_mapping_fn", sampling.policy_mapping_fn
    yield from (("sampling.callbacks", name) for name in sampling.callbacks)
    yield "module.build", config.module.build
    yield from (("logging.loggers", name) for name in config.logging.loggers if ":" in name)


def _of_pieces(key: str, pieces: Iterable[str | Mapping[str, Any]]) -> Iterator[Named]:
    for piece in pieces:
        name = piece if isinstance(piece, str) else piece.get("build")
        if isinstance(name, str):
            yield key, name


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for part in tree.values():
            yield from _texts(part)
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from _texts(part)


def _needs_no_import(env: str) -> bool:
    """Return whether `env` is a gymnasium id without a module to import, or was registered in this process."""
    from headrace.workers.envs.creators import registered_creator

    return registered_creator(env) is not None or (":" not in env and not env.startswith(_OF_ANOTHER_ENV))


def _check_form(allow: Iterable[str]) -> None:
    for one in allow:
        if _NAME.fullmatch(one) is None:
            raise ConfigError(f"should be PACKAGE:NAME, such as my_envs:make_env, got {one!r:.80}", key="allow")
