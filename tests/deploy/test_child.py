"""One child: its session, its signals, its log and its death with its parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.deploy.process.child import Child, describe_end
from headrace.deploy.process.proc_stat import is_alive
from headrace.schemas.errors import RunDirError
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.processes


def ended(child: Child) -> int:
    readable, _, _ = select.select([child.pidfd], [], [], TIMEOUT_S)
    assert readable, "the child did not end"
    return child.reap()


def python(script: str, log: Path) -> Child:
    return Child([sys.executable, "-c", script], log)


def test_an_error_of_several_lines_is_one_sentence(tmp_path: Path) -> None:
    child = python("import sys; sys.exit('error: env 0 failed: first\\n  second; check env')", tmp_path / "log")
    ended(child)
    assert child.last_error() == "env 0 failed: first second; check env"


def test_the_processes_that_a_child_started_end_with_the_child(tmp_path: Path) -> None:
    """Such a process is, for example, a simulator of a user's env, which would outlive a killed worker."""
    script = "import subprocess, sys; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); sys.stdin.read()"
    child = python(script, tmp_path / "log")
    ended(child)
    (grandchild,) = child.log_lines(1)
    wait_until(lambda: not is_alive(int(grandchild)), "the end of the grandchild")


def test_a_log_that_cannot_be_written_is_one_typed_error(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="No such file or directory"):
        python("", tmp_path / "removed" / "log")


def test_output_and_errors_go_to_the_log_and_the_last_error_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert ended(python("print('error: of an earlier life')", log)) == 0
    child = python("import sys; print('one'); print('error: it broke', file=sys.stderr); sys.exit(5)", log)
    assert ended(child) == 5
    assert child.last_error() == "it broke"
    assert "one" in child.log_lines(5)
    assert "error: of an earlier life" not in child.log_lines(5)
    assert "earlier life" in log.read_text()


def test_a_child_has_a_session_of_its_own_and_no_stdin(tmp_path: Path) -> None:
    script = "import os, sys; print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))"
    child = python(script, tmp_path / "log")
    assert ended(child) == 0
    assert child.log_lines(1) == ["True ''"]


def test_a_signal_after_the_end_of_a_child_reaches_no_process(tmp_path: Path) -> None:
    child = python("pass", tmp_path / "log")
    select.select([child.pidfd], [], [], TIMEOUT_S)
    child.send(signal.SIGKILL)
    assert child.reap() == 0
    child.send(signal.SIGKILL)


def test_a_missing_program_is_named_in_the_log(tmp_path: Path) -> None:
    child = Child(["/no/such/program"], tmp_path / "log")
    assert ended(child) == 1
    assert child.last_error() == "/no/such/program cannot be run: No such file or directory"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_children_die_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    """The parent is killed without a chance to say anything; its child, deaf to SIGTERM, ends nevertheless."""
    grandchild = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
    script = f"""
        import sys, signal, pathlib
        from headrace.deploy.process.child import Child
        child = Child([sys.executable, "-c", {grandchild!r}], pathlib.Path({str(tmp_path / "log")!r}))
        while "up" not in child.log_path.read_text():
            pass
        print(child.pid, flush=True)
        signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(number)
        readable, _, _ = select.select([pidfd], [], [], TIMEOUT_S)
        os.close(pidfd)
    assert readable, "the child outlived its parent"


def test_ends_are_described_in_words() -> None:
    assert describe_end(-9) == "signal SIGKILL"
    assert describe_end(-40) == "signal 40"
    assert describe_end(4) == "exit code 4 (ENV)"
    assert describe_end(77) == "exit code 77"
