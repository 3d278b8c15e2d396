"""The error that ends a whole fleet, a leaf of the tree in `schemas/errors`, and its kinds."""

from __future__ import annotations

from headrace.schemas.errors import ExitCode, HeadraceError


class FleetError(HeadraceError):
    """A fleet, or a command about one, cannot go on. `exit_code` is that of the process that ends with the error."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILURE) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def scale_error(problem: str, advice: str) -> FleetError:
    """Return the error for a run that cannot have the number of workers that was asked for."""
    return FleetError(f"the number of workers is not changed: {problem}; {advice}")


def slurm_error(what: str, reason: str, advice: str) -> FleetError:
    """Return the error for `what`, which Slurm refused or did not answer; `reason` has all that it said."""
    return FleetError(f"{what}: {reason}; {advice}", ExitCode.UNREACHABLE)
