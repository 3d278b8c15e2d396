"""Errors of environments, wherever they run."""

from __future__ import annotations

from headrace.schemas.errors.fleet import ConfigError
from headrace.schemas.errors.root import ExitCode, HeadraceError


class EnvError(HeadraceError):
    """An environment could not be built or broke its contract."""

    exit_code = ExitCode.ENV


def missing_env_error() -> ConfigError:
    """Return the error for a config that names no env where one is needed."""
    return ConfigError(
        "no environment is configured; give EnvRunnerConfig(env=...) a gymnasium id, a registered name, "
        "'package.module:make_env', a class, or a callable that takes an EnvContext",
        key="env",
    )


class UnknownEnvError(EnvError):
    """No environment of that name was found. `env` is the name as given, `reason` says why."""

    def __init__(self, env: str, reason: str) -> None:
        self.env, self.reason = env, reason
        super().__init__(
            f"environment {env!r} cannot be found: {reason}; give a registered gymnasium id, 'module:id' with the "
            "module of yours that registers it, 'package.module:make_env', an environment class, or a callable that "
            "takes an EnvContext"
        )


class EnvContractError(EnvError, ValueError):
    """An env returned something that its contract forbids. `what` names it; `seen` is a short repr of it."""

    def __init__(self, what: str, seen: str, expected: str) -> None:
        self.what, self.seen, self.expected = what, seen, expected
        super().__init__(f"{what} should be {expected}, got {seen}")


class EnvRaisedError(EnvError):
    """An env in another process raised an error. `kind` is the error's class name, `trace` its traceback as text."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        self.kind, self.message, self.trace = kind, message, trace
        super().__init__(f"{kind}: {message}" if message else kind)
        if trace:
            self.add_note(trace.rstrip())


class EnvHangError(EnvError):
    """An env did not return from `phase` within `timeout_s` seconds. `stack` is where its process stood then."""

    def __init__(self, env_index: int, phase: str, timeout_s: float, setting: str, stack: str) -> None:
        self.env_index, self.phase, self.timeout_s = env_index, phase, timeout_s
        self.setting, self.stack = setting, stack
        where = f"; it stood at\n{stack.rstrip()}" if stack else ""
        seen = f"env {env_index} did not return from {phase} within {setting} = {timeout_s:g} s"
        super().__init__(f"{seen} and its process was killed{where}")


class EnvCrashError(EnvError):
    """A process of envs ended by `cause`, a signal or an exit code. `stack` and `output` are the last it wrote."""

    def __init__(self, pid: int, cause: str, during: str, stack: str, output: str) -> None:
        self.pid, self.cause, self.during = pid, cause, during
        self.stack, self.output = stack, output
        words = [f"the env's process {pid} ended by {cause} {during}"]
        words += [f"it stood at\n{stack.rstrip()}"] if stack else []
        words += [f"its last output was\n{output.rstrip()}"] if output else []
        super().__init__("; ".join(words))


class EnvNeighbourError(EnvError):
    """This env is fine, but its process was lost: `culprit`, another env in it, took it down."""

    def __init__(self, culprit: int, cause: str) -> None:
        self.culprit, self.cause = culprit, cause
        super().__init__(f"its process was lost to its neighbour, env {culprit} ({cause})")


class EnvHostLostError(EnvError):
    """This env is fine, but its host is lost. `host` names the host."""

    def __init__(self, host: str, reason: str) -> None:
        self.host, self.reason = host, reason
        super().__init__(f"its host {host} {reason}")


class EnvRestartBudgetError(EnvError):
    """An env failed `failures` times within `window_s` seconds; the last failure is `__cause__`."""

    exit_code = ExitCode.ENV_RESTART_BUDGET

    def __init__(
        self,
        env_index: int,
        failures: int,
        window_s: float,
        last: str,
        remedy: str = "repair the env, or raise env_restart_attempts",
    ) -> None:
        self.env_index, self.failures, self.window_s = env_index, failures, window_s
        super().__init__(
            f"env {env_index} failed {failures} times within {window_s:g} s and is given up (last: {last}); {remedy}"
        )
