"""Entry point of the `headrace` command. It imports next to nothing before it handles Ctrl-C and SIGTERM.

The imports of a command take a second or more. A `KeyboardInterrupt` in the midst of them prints a traceback, or is
lost in a library that catches it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from headrace.deploy.terminal.std_streams import open_std_streams, say

UNHEALTHY = 21
"""Exit code FINDINGS of `schemas.errors.ExitCode`, which takes longer to import than the whole probe."""

_CONFIG = 3
"""Its exit code CONFIG."""

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of a command that Ctrl-C or SIGTERM ended: 128 and the signal's number, as shells have it."""

_PATIENCE_S = 2.0
"""Seconds that threads which are not daemons, and processes of multiprocessing, get at the end of a process."""
_PATIENCE_OF_UP_S = 10.0
"""`headrace up` runs no env, but a logger of the user's may have a file to send: it gets as long as for its `close`."""

_STOPPED = "stopped by SIGTERM"

_UNWRITABLE = 120
"""Python's exit code where output cannot be written."""

_came = 0
"""The number of the first signal that came."""

_START_NOTHING = frozenset(("--help", "--print-config"))
"""Options with which a command starts nothing."""


def main() -> None:
    """Run the command line."""
    status = run_to_end(_run_command_line, _PATIENCE_OF_UP_S if sys.argv[1:2] == ["up"] else _PATIENCE_S)
    sys.exit(status)  # type: ignore[arg-type]  # Python reports output that cannot be written, or a message


def run_to_end(command: Callable[[], None], patience_s: float = _PATIENCE_S) -> object:
    """Run a command and end this process. Return the exit status only where `end_process` returns.

    Until a command that drains takes the signals, Ctrl-C ends it with `INTERRUPTED`, and SIGTERM with `TERMINATED`.
    Handle SIGINT even if it was inherited as ignored, as by `headrace up &` in a script. Ctrl-C then ends the script
    and this process.
    """
    status: object = 0
    try:
        signal.signal(signal.SIGINT, _on_signal)
        signal.signal(signal.SIGTERM, _on_signal)
        os.register_at_fork(after_in_child=_die_of_sigterm)
        command()
    except KeyboardInterrupt:
        status = INTERRUPTED
        if _came == signal.SIGTERM:
            status = TERMINATED
            say(_STOPPED, sys.stderr)
    except SystemExit as end:
        status = end.code
    except Exception:  # noqa: BLE001 - the interpreter would show it too, and then wait for all threads
        say(traceback.format_exc().rstrip(), sys.stderr)
        status = 1
    signal.signal(signal.SIGINT, _end_at_once)
    signal.signal(signal.SIGTERM, _end_at_once)
    end_process(status, patience_s)
    return status


def _run_command_line() -> None:
    open_std_streams()  # an import may leave a file open, which would get the number of a closed stream
    if fault := _fault_of_place():
        say(f"error: {fault}", sys.stderr)
        sys.exit(_CONFIG)
    if sys.argv[1:2] == ["health"]:
        _answer_plain_probe(sys.argv[2:])
    if _starts_processes(sys.argv[1:]):
        _start_fork_server()
    gc.disable()  # garbage collection of lasting objects takes a seventh of the import time
    run_command = _import_command_line()
    gc.enable()
    run_command()


def _fault_of_place() -> str:
    """Return why no command can run in this working directory and locale; "" where it can."""
    try:
        "".join((os.getcwd(), *sys.argv)).encode()  # noqa: PTH109 - pathlib takes its time to import
    except OSError:
        return "the working directory was removed; change to another one"
    except UnicodeEncodeError:
        return "the working directory, or a name given, has characters that this locale lacks; set LC_ALL=C.UTF-8"
    return ""


def _import_command_line() -> Callable[[], None]:
    """Return the command line. Where a limit leaves no memory for its imports, end with a sentence."""
    try:
        from headrace.deploy.command.cli import main as run_command
    except (ImportError, MemoryError, OSError) as error:
        from headrace.schemas.errors import machine_error

        if (told := machine_error(error)) is None:
            raise
        sys.exit(f"error: {told}")
    return run_command


def _starts_processes(words: list[str]) -> bool:
    """Return whether the command runs a fleet or a group of workers."""
    many = words[:1] == ["up"] or (words[:1] == ["worker"] and any(word.startswith("--count") for word in words))
    return many and not set(words) & _START_NOTHING


def _start_fork_server() -> None:
    """Let the fork server import torch while we import the command line, and read the settings."""
    from headrace.deploy.process.child_environment import child_environment
    from headrace.deploy.process.fork_server import start_early
    from headrace.deploy.process.service_manager import service_manager

    service_manager()  # removes variables that are for this process only from the environment
    start_early(child_environment(1))


def end_process(status: object, patience_s: float = _PATIENCE_S) -> None:
    """End this process as the interpreter would, but do not free its objects, which takes 0.2 s.

    Threads and processes of multiprocessing that the user's code has left get `patience_s` seconds each. Then the
    processes are killed, and a line on stderr names what was left.

    Return only if output cannot be written, or if `status` is no exit code.
    """
    if threads := _lasting_threads():
        waiter = threading.Thread(target=_join_threads, daemon=True)
        with contextlib.suppress(RuntimeError, MemoryError):  # no memory for it: they get no time
            waiter.start()
            waiter.join(patience_s)
        threads = _lasting_threads()
    _say_left("thread", [thread.name for thread in threads])
    _limit_children(patience_s)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, ValueError):
        pass  # an env has closed one of them, or put an object in its place
    except OSError:
        if threads:
            os._exit(_UNWRITABLE)
        return
    if status is None or isinstance(status, int):
        os._exit(status or 0)


def _lasting_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]


def _join_threads() -> None:
    """Wait for all threads that are not daemons, as the interpreter would. Idle threads of pools are told to end."""
    for tell in reversed(threading._threading_atexits):  # type: ignore[attr-defined]
        tell()
    while threads := _lasting_threads():
        for thread in threads:
            thread.join()


def _limit_children(patience_s: float) -> None:
    """Kill the processes of multiprocessing in `patience_s` seconds. Its function at exit joins them without a limit.

    Even one that it terminates may go on: a forked one has our handler of SIGTERM.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is None or not (children := processes.active_children()):
        return

    def kill() -> None:
        time.sleep(patience_s)
        left = [child for child in children if child.is_alive()]
        try:
            _say_left("process", [child.name for child in left])
        finally:
            for child in left:
                child.kill()  # this process then ends at once

    with contextlib.suppress(RuntimeError, MemoryError):
        threading.Thread(target=kill, daemon=True).start()


def _say_left(what: str, names: list[str]) -> None:
    if names:
        from headrace.deploy.process.child import LEFT

        with contextlib.suppress(OSError, ValueError):
            say(f"{LEFT}{what} {', '.join(map(repr, names))}", sys.stderr)


def _answer_plain_probe(words: list[str]) -> None:
    """Answer `headrace health` and exit, if its options are those of probes. The command line is ten times slower."""
    from headrace.deploy.run.health import answer, asked_plainly

    question = asked_plainly(words)
    if question is not None:
        healthy, sentence = answer(question)
        say(sentence)
        sys.exit(0 if healthy else UNHEALTHY)


def _on_signal(number: int, frame: FrameType | None) -> None:
    """End at once in the midst of an import. Else let the command clean up; a second signal ends it at once."""
    global _came
    if _came or _is_importing(frame):
        _end_at_once(number)
    _came = number
    raise KeyboardInterrupt  # this handler stays, by which `raise_stop` knows where the error comes from


def _end_at_once(number: int, frame: FrameType | None = None) -> None:
    if number == signal.SIGTERM:
        with contextlib.suppress(OSError):
            os.write(2, f"{_STOPPED}\n".encode())  # not by `say`: the signal may have come within it
    os._exit(128 + number)


def _die_of_sigterm() -> None:
    """Leave SIGTERM to the kernel in a copy that a library has forked: it terminates such processes of its own."""
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
