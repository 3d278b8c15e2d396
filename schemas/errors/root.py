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
    LEDGER = 1


class HeadraceError(Exception):
    """Root of every error that Headrace raises on purpose."""

    exit_code: ExitCode = ExitCode.FAILURE
