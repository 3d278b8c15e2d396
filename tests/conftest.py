"""Fixtures for every test, and a last look that none of them left a process or a file behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ports
from support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]

# A shell starts its background jobs with Ctrl-C ignored, and programs hand that on to their children.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def free_port() -> int:
    """A loopback TCP port that nobody listened on a moment ago, and that no outgoing connection is given."""
    return ports.free_port()


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root folder."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def child_processes_find_support() -> Iterator[None]:
    """Let child processes import `support`: they find envs by import paths such as `support.envs.toy:make_counting`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the session when a child process still runs or a new file stands in the repository at its end."""
    before = _untracked()
    yield
    wait_until(lambda: not _children(), f"the end of child processes {_children()}", 30.0)
    left = _untracked() - before
    assert not left, f"tests left files in the repository: {sorted(left)[:10]}"


def _children() -> list[str]:
    """Command lines of this process' living children. multiprocessing's resource tracker ends with its parent."""
    found = []
    for task in Path("/proc/self/task").glob("*/children"):
        for pid in task.read_text().split():
            line = _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
            if line and "resource_tracker" not in line:
                found.append(f"{pid}: {line}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _untracked() -> set[str]:
    """Files that git neither tracks nor ignores. Asked in CI only: elsewhere somebody may be writing code meanwhile."""
    if "CI" not in os.environ or not (ROOT / ".git").exists():
        return set()
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=all"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    return {line[3:] for line in listed.stdout.splitlines() if line.startswith("??")}
