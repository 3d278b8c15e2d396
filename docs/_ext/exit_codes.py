"""The table of exit codes, from the code's own enumeration."""

from __future__ import annotations

from headrace.schemas import errors
from headrace.schemas.errors import ExitCode, HeadraceError
from headrace.schemas.errors.wire import REFUSAL_EXIT_CODES

_OF_REFUSALS = {
    errors.RefusedError: {ExitCode.PROTOCOL, *REFUSAL_EXIT_CODES.values()}
    - {ExitCode.FENCED},
    errors.FencedError: (ExitCode.FENCED,),
    errors.KeysRefusedError: (ExitCode.KEYS,),
}


def exit_codes_as_markdown() -> str:
    """Return a table: number, name, and the errors that end a process with it."""
    kinds: dict[int, list[str]] = {}
    for name in sorted(vars(errors)):
        kind = getattr(errors, name)
        if (
            isinstance(kind, type)
            and issubclass(kind, HeadraceError)
            and kind is not HeadraceError
        ):
            for code in _OF_REFUSALS.get(kind, (kind.exit_code,)):
                kinds.setdefault(int(code), []).append(f"`{name}`")
    rows = [
        f"| {int(code)} | `{code.name}` | {', '.join(kinds.get(int(code), []))} |"
        for code in ExitCode
    ]
    return "\n".join(["| code | name | errors |", "|---|---|---|", *rows])
