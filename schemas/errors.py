"""Every error Headrace raises on purpose, and the exit code a process ends with when it meets one.

    HeadraceError
    ├── ConfigError             a setting is unknown, malformed or clashes with another
    ├── KeysError               a key file is missing, damaged, or a secret that others may read
    ├── EnvError                an environment could not be built or broke its contract
    │   ├── UnknownEnvError         no such environment id, import path or callable
    │   ├── EnvContractError        reward, info or observation is not what the env's spaces promise
    │   ├── EnvRaisedError          an env in a process of its own raised
    │   ├── EnvHangError            an env in a process of its own did not answer in time, so that was killed
    │   ├── EnvCrashError           a process of envs ended by itself, or took too much memory
    │   ├── EnvNeighbourError       another env of the same process took it down
    │   ├── EnvHostLostError        the host of remote envs fell silent, left, or was refused
    │   ├── EnvRestartBudgetError   an env kept failing until its rebuild budget was spent
    │   └── (external ones)         RunReturnedError, ClientLostError and ExternalSilenceError of episode_errors.py
    ├── EpisodeError            a call about an external episode cannot be done: episode_errors.py has its kinds
    ├── EpisodeTimeoutError     such a call was not answered within its deadline
    ├── ModuleError             a policy module could not be built, or answered with the wrong arrays
    │   └── WhichModuleError        a fleet of several modules was asked for one without its name, or for another
    ├── CallbackError           a user's callback raised
    ├── RunnerStoppedError      a runner was asked to sample after it was stopped
    ├── RunnerBusyError         a callback asked its own runner for what cannot be done just then
    ├── ChunkError              chunks that are no parts of one episode, or a cut that leaves no step
    ├── StateError              a runner's state that does not fit the runner it is given to
    ├── ConnectorError          a connector raised, or answered with the wrong arrays
    ├── WireError               bytes or messages that break the protocol
    │   ├── DecodeError             a message that is not a valid Headrace message
    │   └── EncodeError             something that must not or cannot go on the wire
    │       └── InfosTooLargeError      the infos of one batch
    ├── RefusedError            the broker refused this peer
    │   ├── WrongFleetError         the peer belongs to another fleet
    │   ├── VersionMismatchError    the peer speaks another protocol version
    │   ├── FencedError             a newer incarnation or a newer learner has taken this one's place
    │   └── KeysRefusedError        the broker has not let this peer in: its keys are not those asked for
    ├── UnreachableError        a server did not answer within its deadline
    │   ├── RedisUnavailableError   Redis did not answer, or refuses writes
    │   └── NoEnvHostError          no env host was at a worker's port for too long
    ├── PortInUseError          an endpoint is taken
    ├── RunDirError             the run directory cannot be used
    ├── CheckpointError         a learner's checkpoint is torn or corrupt
    ├── CrashLoopError          a process of the fleet kept dying until its restart budget was spent
    ├── WindowStalledError      the learner holds every batch uncommitted and waits for more
    └── LedgerError             the books do not balance

Each error carries its facts as attributes and builds its own sentence from them: what happened, to what, the numbers,
what to do. `exit_code` is what a process of ours exits with when the error reaches its edge.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """What a Headrace process exits with; scripts may rely on these numbers."""

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
    LEDGER = 1


class HeadraceError(Exception):
    """Root of every error Headrace raises on purpose."""

    exit_code: ExitCode = ExitCode.FAILURE


class ConfigError(HeadraceError):
    """A setting is unknown, malformed or clashes with another; `key` names it, `source` says where it came from."""

    exit_code = ExitCode.CONFIG

    def __init__(self, message: str, *, key: str | None = None, source: str | None = None) -> None:
        self.key = key
        self.source = source
        where = f" (from {source})" if source else ""
        super().__init__(f"{key}: {message}{where}" if key else f"{message}{where}")


class KeysError(HeadraceError):
    """The key file or folder at `path` cannot be used, for `reason`, which says what to do."""

    exit_code = ExitCode.KEYS

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"keys: {path} cannot be used: {reason}")


class EnvError(HeadraceError):
    """An environment could not be built or broke its contract."""

    exit_code = ExitCode.ENV


class UnknownEnvError(EnvError):
    """No environment of that name can be found; `env` is the name as given, `reason` what stood in the way."""

    def __init__(self, env: str, reason: str) -> None:
        self.env = env
        self.reason = reason
        super().__init__(
            f"environment {env!r} cannot be found: {reason}; give a registered gymnasium id or 'module:id', "
            "'package.module:make_env', an environment class, or a callable that takes an EnvContext"
        )


class EnvContractError(EnvError, ValueError):
    """An env answered with something its contract forbids; `what` is the offending part, `seen` a short repr of it."""

    def __init__(self, what: str, seen: str, expected: str) -> None:
        self.what = what
        self.seen = seen
        self.expected = expected
        super().__init__(f"{what} should be {expected}, got {seen}")


class EnvRaisedError(EnvError):
    """An env in another process raised an error of the name `kind`; `trace` is where, as Python prints it."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        self.kind = kind
        self.message = message
        self.trace = trace
        super().__init__(f"{kind}: {message}" if message else kind)
        if trace:
            self.add_note(trace.rstrip())


class EnvHangError(EnvError):
    """An env did not return from `phase` within `timeout_s` seconds; `stack` is where its process stood then."""

    def __init__(
        self,
        env_index: int,
        phase: str,
        timeout_s: float,
        setting: str,
        stack: str,
        fate: str = "its process was killed",
    ) -> None:
        self.env_index = env_index
        self.phase = phase
        self.timeout_s = timeout_s
        self.setting = setting
        self.stack = stack
        where = f"; it stood at\n{stack.rstrip()}" if stack else ""
        super().__init__(
            f"env {env_index} did not return from {phase} within {setting} = {timeout_s:g} s and {fate}{where}"
        )


class EnvCrashError(EnvError):
    """A process of envs ended by `cause`, a signal or an exit code; `stack` and `output` are its last words."""

    def __init__(self, pid: int, cause: str, during: str, stack: str, output: str) -> None:
        self.pid = pid
        self.cause = cause
        self.during = during
        self.stack = stack
        self.output = output
        words = [f"the env's process {pid} ended by {cause} {during}"]
        words += [f"it stood at\n{stack.rstrip()}"] if stack else []
        words += [f"its last output was\n{output.rstrip()}"] if output else []
        super().__init__("; ".join(words))


class EnvNeighbourError(EnvError):
    """Nothing is wrong with this env, but its process was lost, by what `culprit` did."""

    def __init__(self, culprit: int, cause: str) -> None:
        self.culprit = culprit
        self.cause = cause
        super().__init__(f"its process was lost to its neighbour, env {culprit} ({cause})")


class EnvHostLostError(EnvError):
    """Nothing is wrong with this env, but the host it was on is lost; `host` names it."""

    def __init__(self, host: str, reason: str) -> None:
        self.host = host
        self.reason = reason
        super().__init__(f"its host {host} {reason}")


class EnvRestartBudgetError(EnvError):
    """An env failed `failures` times within `window_s` seconds; the last failure is `__cause__`."""

    exit_code = ExitCode.ENV_RESTART_BUDGET

    def __init__(
        self, env_index: int, failures: int, window_s: float, last: str, setting: str = "max_env_restarts_per_window"
    ) -> None:
        self.env_index = env_index
        self.failures = failures
        self.window_s = window_s
        super().__init__(
            f"env {env_index} failed {failures} times within {window_s:g} s and is given up (last: {last}); "
            f"repair the env, or raise {setting}"
        )


class ModuleError(HeadraceError):
    """A policy module could not be built, or answered with the wrong arrays."""

    exit_code = ExitCode.MODULE


class WhichModuleError(ModuleError, LookupError):
    """`asked` names none of the fleet's `modules`, or nothing was named where there are several."""

    def __init__(self, asked: str | None, modules: Collection[str]) -> None:
        self.asked = asked
        self.modules = sorted(modules)
        what = "which module is meant is not said" if asked is None else f"there is no module {asked!r:.80}"
        super().__init__(f"{what}; this fleet's modules are {self.modules!r:.300}")


class CallbackError(HeadraceError):
    """`callback` raised in `event`; its own error is `__cause__`. `samples` is what was sampled, if that was all."""

    exit_code = ExitCode.CALLBACK

    def __init__(self, event: str, callback: str, cause: BaseException) -> None:
        self.event = event
        self.callback = callback
        self.samples: Any = None
        super().__init__(
            f"callback {callback} failed in {event} ({type(cause).__name__}: {cause}); "
            "repair it, or take it out of callbacks"
        )


class RunnerStoppedError(HeadraceError):
    """`sample` was called after `stop`, which has closed all envs."""

    def __init__(self) -> None:
        super().__init__("this runner was stopped and has closed its envs; make_env() builds them anew")


class RunnerBusyError(HeadraceError):
    """`call` of a runner was made by one of its own callbacks, in `event`, where it cannot be done."""

    exit_code = ExitCode.CALLBACK

    def __init__(self, call: str, event: str) -> None:
        self.call = call
        self.event = event
        super().__init__(
            f"{call} cannot be called in {event}, in the midst of what the runner does; call it in on_sample_end, or "
            "after sample()"
        )


class ChunkError(HeadraceError, ValueError):
    """Chunks that are no neighbouring parts of one agent's episode, or a cut that leaves no step."""


class StateError(HeadraceError, ValueError):
    """A state, or the part of it that is named, does not fit the runner it is given to."""

    exit_code = ExitCode.CONFIG


class ConnectorError(HeadraceError):
    """A connector raised, or answered with the wrong arrays; `connector` says which one, `seen` what it was given."""

    exit_code = ExitCode.MODULE

    def __init__(self, connector: str, reason: str, seen: str = "") -> None:
        self.connector = connector
        self.seen = seen
        super().__init__(f"connector {connector} failed: {reason}" + (f" (it was given {seen})" if seen else ""))


class WireError(HeadraceError):
    """Bytes or messages that break the protocol."""

    exit_code = ExitCode.PROTOCOL


class DecodeError(WireError):
    """A message that is not a valid Headrace message; `reason` is a stable word, `detail` says what was seen."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}")


class EncodeError(WireError):
    """Something that must not or cannot go on the wire."""


class InfosTooLargeError(EncodeError):
    """A batch's infos are `nbytes` bytes of JSON, and no more than `limit` go into one message."""

    def __init__(self, nbytes: int, limit: int) -> None:
        self.nbytes = nbytes
        self.limit = limit
        super().__init__(
            f"a batch's infos have {nbytes} bytes of JSON; {limit} are allowed; "
            "shorten rollout_fragment_length, drop values in the env, or set infos = 'none'"
        )


class RefusedError(HeadraceError):
    """The broker, or the worker whom this env host came to, refused this peer; `code` is the wire's word for why."""

    exit_code = ExitCode.PROTOCOL

    def __init__(self, code: str, detail: str) -> None:
        self.code = code
        self.detail = detail
        super().__init__(detail)


class WrongFleetError(RefusedError):
    """The peer belongs to another fleet."""

    exit_code = ExitCode.WRONG_FLEET


class VersionMismatchError(RefusedError):
    """The peer speaks another protocol version."""

    exit_code = ExitCode.VERSION_MISMATCH


class FencedError(RefusedError):
    """A newer incarnation of this slot, or a newer learner, has taken this one's place."""

    exit_code = ExitCode.FENCED


class KeysRefusedError(RefusedError):
    """The broker at `endpoint`, or whatever `server` is there, and this peer did not agree about keys, so nothing was
    ever said between them."""

    exit_code = ExitCode.KEYS

    def __init__(self, endpoint: str, detail: str, server: str = "broker") -> None:
        self.endpoint = endpoint
        super().__init__("keys", f"the {server} at {endpoint} {detail}")


class UnreachableError(HeadraceError):
    """`endpoint` did not answer within `deadline_s` seconds."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(self, what: str, endpoint: str, deadline_s: float) -> None:
        self.endpoint = endpoint
        self.deadline_s = deadline_s
        super().__init__(
            f"no {what} answers at {endpoint} after {deadline_s:g} s; check that it runs and the address is right"
        )


class RedisUnavailableError(UnreachableError):
    """Redis did not answer, or refuses writes. `endpoint` is its URL without the password."""

    exit_code = ExitCode.REDIS_UNAVAILABLE

    def __init__(self, url: str, reason: str, deadline_s: float = 0.25) -> None:
        self.endpoint = re.sub(r"//[^/@]*@", "//***@", url)
        self.deadline_s = deadline_s
        HeadraceError.__init__(
            self,
            f"Redis at {self.endpoint} cannot be used: {reason}; start it, correct --redis-url, or leave it out",
        )


class NoEnvHostError(UnreachableError):
    """No env host was at `endpoint`, the port of a worker or runner, for `deadline_s` seconds; `remedy` starts one."""

    def __init__(self, endpoint: str, deadline_s: float, remedy: str) -> None:
        self.endpoint = endpoint
        self.deadline_s = deadline_s
        self.remedy = remedy
        HeadraceError.__init__(
            self,
            f"no env host was at {endpoint} for env_hosts_timeout_s = {deadline_s:g} s; start one: {remedy}",
        )


class PortInUseError(HeadraceError):
    """An endpoint is taken by another process."""

    exit_code = ExitCode.PORT_IN_USE

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        super().__init__(
            f"{endpoint} is already in use; stop the process that holds it, or choose another port (0 takes a free one)"
        )


class RunDirError(HeadraceError):
    """The run directory cannot be used; `path` names it."""

    exit_code = ExitCode.RUN_DIR

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        super().__init__(f"run directory {path} cannot be used: {reason}; choose another with --run-dir")


class CheckpointError(HeadraceError):
    """The checkpoint at `path` is not there, torn, corrupt, or of another module; `advice` is what to do."""

    exit_code = ExitCode.RUN_DIR

    def __init__(self, path: str, reason: str, advice: str = "move it away to train from the start") -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"checkpoint {path} cannot be used: {reason}; {advice}")


class CrashLoopError(HeadraceError):
    """A process of the fleet kept dying until its restart budget was spent."""

    exit_code = ExitCode.CRASH_LOOP


class WindowStalledError(HeadraceError):
    """The learner holds `uncommitted` batches uncommitted and waits for more, while every worker waits for a commit."""

    exit_code = ExitCode.WINDOW_STALLED

    def __init__(self, uncommitted: int, waited_s: float) -> None:
        self.uncommitted = uncommitted
        super().__init__(
            f"the stream holds {uncommitted} uncommitted batches and has waited {waited_s:g} s for another, while "
            "every worker waits for a commit; commit more often, or what you have once stream.starved is true, or "
            "raise worker.window_batches, worker.window_bytes and broker.max_held_bytes"
        )


class LedgerError(HeadraceError):
    """The books do not balance; the message names each row and what is wrong with it."""

    exit_code = ExitCode.LEDGER


REFUSALS: dict[str, type[RefusedError]] = {
    "wrong_fleet": WrongFleetError,
    "version_mismatch": VersionMismatchError,
    "fenced": FencedError,
}


def refusal(code: str, detail: str) -> RefusedError:
    """The typed error for a REJECT or FENCED message with `code`."""
    return REFUSALS.get(code, RefusedError)(code, detail)
