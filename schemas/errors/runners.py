"""Errors of policies, callbacks and connectors, and of calls that a runner cannot do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headrace.schemas.errors.root import ExitCode, HeadraceError, words_of


class ModuleError(HeadraceError):
    """A policy module could not be built, or returned the wrong arrays."""

    exit_code = ExitCode.MODULE


def which_module_error(asked: str | None, modules: Collection[str]) -> ModuleError:
    """Return the error for `asked`, which is none of `modules`; for None, several modules and no name."""
    what = "no module was named" if asked is None else f"there is no module {asked!r:.80}"
    return ModuleError(f"{what}; this fleet's modules are {sorted(modules)!r:.300}")


WRAPPERS = frozenset(("_orig_mod", "module"))
"""The parts that torch.compile and DDP put into the names of tensors."""


class WeightsMismatchError(ModuleError):
    """Weights have other names, shapes or kinds of number than the workers' module.

    - missing: names that the module has and the weights lack.
    - unknown: names that the module does not have.
    - shapes: name -> (shape of the weights, shape of the module), where they differ.
    - dtypes: name -> (dtype of the weights, dtype of the module), where a cast would change numbers.

    `unsaved` begins the sentence of an error that kept weights from being saved.
    """

    def __init__(
        self,
        missing: Sequence[str],
        unknown: Sequence[str],
        shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
        module_id: str = "",
        dtypes: Mapping[str, tuple[str, str]] | None = None,
        unsaved: str = "",
    ) -> None:
        self.missing = list(missing)
        self.unknown = list(unknown)
        self.shapes = dict(shapes)
        self.dtypes = dict(dtypes or {})
        self.module_id = module_id
        faults = []
        if missing or unknown:
            faults.append(f"missing {_some(self.missing)}, unknown {_some(self.unknown)}")
        faults += [
            f"{name!r:.200} has shape {given}, the module's {own}" for name, (given, own) in [*shapes.items()][:5]
        ]
        faults += [
            f"{name!r:.200} is {given}, the module's {own}, and a cast would change its numbers"
            for name, (given, own) in [*self.dtypes.items()][:5]
        ]
        if wrapped := sorted(WRAPPERS & {part for name in self.unknown for part in name.split(".")}):
            faults.append(f"{' and '.join(f'`{part}.`' for part in wrapped)} is of a wrapper (torch.compile, DDP)")
        which = f"module {module_id!r}" if module_id else "the module"
        super().__init__(
            f"{unsaved}weights do not fit {which}: {'; '.join(faults)}; "
            "give worker and learner the same module.build and module.config"
        )


def _some(names: Sequence[str]) -> str:
    """Return the first few names, which may come from a stranger's file and be of any length."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"[{', '.join(f'{name!r:.200}' for name in names[:5])}]{more}"


class NotFiniteError(ModuleError):
    """Weights, or what a policy returned, are NaN or infinite: `bad` of the `size` values of `name`."""

    def __init__(self, name: str, bad: int, size: int, sentence: str) -> None:
        self.name, self.bad, self.size = name, bad, size
        super().__init__(sentence)


class RefusedWeightsError(ModuleError):
    """A worker could not load weights `version`, and goes on with those it has."""

    def __init__(self, version: tuple[int, int], slot: int, detail: str) -> None:
        self.version, self.slot = version, slot
        super().__init__(f"worker {slot} cannot load weights {version} and keeps those it has: {detail}")


class CallbackError(HeadraceError):
    """`callback` raised in `event`; its own error is `__cause__`.

    `samples` holds the finished samples, if there are any.
    """

    exit_code = ExitCode.CALLBACK

    def __init__(self, event: str, callback: str, cause: BaseException) -> None:
        self.event, self.callback = event, callback
        self.samples: Any = None
        super().__init__(
            f"callback {callback} failed in {event} ({words_of(cause)}); repair it, or take it out of callbacks"
        )


class ChunkError(HeadraceError, ValueError):
    """Chunks that are not neighbouring parts of one agent's episode, or a cut that leaves no step."""


class StateError(HeadraceError, ValueError):
    """A state, or the named part of it, does not fit the runner it is given to."""

    exit_code = ExitCode.CONFIG


class ConnectorError(HeadraceError):
    """A connector raised, or returned the wrong arrays. `connector` names it; `seen` says what it was given."""

    exit_code = ExitCode.MODULE

    def __init__(self, connector: str, reason: str, seen: str = "") -> None:
        self.connector, self.seen = connector, seen
        super().__init__(f"connector {connector} failed: {reason}" + (f" (it was given {seen})" if seen else ""))


class PolicyCallError(HeadraceError, ValueError):
    """A call of a trained policy does not fit the policy, such as an observation of another shape."""


def export_error(path: str, reason: str) -> ModuleError:
    """Return the error for a policy that cannot be written to `path`. `reason` names the part that forbids it."""
    return ModuleError(f"the policy cannot be exported to {path}: {reason}")
