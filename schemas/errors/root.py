"""The root of all errors, and the exit codes of processes that end with one."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of Headrace processes. Scripts may rely on these numbers."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    CONFIG = 3
    ENV = 4
    MODULE = 5
    PORT_IN_USE = 6
    RUN_DIR = 7
    REDIS_UNAVAILABLE = 8
    UNREACHABLE = 9
    WRONG_FLEET = 10
    VERSION_MISMATCH = 11
    FENCED = 12
    ENV_RESTART_BUDGET = 13
    CRASH_LOOP = 14
    PROTOCOL = 15
    WINDOW_STALLED = 16
    TIMEOUT = 17
    CALLBACK = 18
    KEYS = 19
    CHAOS = 20
    FINDINGS = 21
    EPISODES_ABORTED = 22
    LEDGER = 1


def words_of(error: BaseException) -> str:
    """Return what user code did, for a sentence: its error with the type, or that it called `sys.exit`."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error.code!r}) instead of raising an exception"
    try:
        # A lone surrogate could not be sent as JSON.
        return f"{type(error).__name__}: {error}".encode(errors="replace").decode()
    except Exception as broken:  # noqa: BLE001 - an error of the user's own class, whose __str__ raises
        return f"{type(error).__name__}, whose message cannot be read: {type(broken).__name__}"


class HeadraceError(Exception):
    """Root of every error that Headrace raises on purpose."""

    exit_code: ExitCode = ExitCode.FAILURE
