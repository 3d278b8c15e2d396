"""Fixtures for every test, and a final check that no test left a process or a file behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from itertools import islice
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support import ports
from support.case_names import name_of
from support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]

# A busy machine may draw an example slowly, and that is no failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell starts its background jobs with Ctrl-C ignored, and programs hand that on to their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Several tests run at once. Threads of BLAS would take the processors from each other, and each process starts some.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else torch 2.4 starts processes that it never ends

# Tests start many processes of Headrace. Each of them would compile all modules, if none may keep what it has compiled.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


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
def seals_stay_out_of_the_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the key by which `headrace up` seals its settings files in a folder of this session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the session when a child process still runs or a new file stands in the repository at its end."""
    before = _untracked()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # from Python 3.14 on it serves async envs until our end
    wait_until(lambda: not _children(), f"the end of child processes {_children()}")
    left = _untracked() - before
    assert not left, f"tests left files in the repository: {sorted(left)[:10]}"


@pytest.fixture(scope="session", autouse=True)
def fleets_have_no_dashboard() -> Iterator[None]:
    """Start no dashboard in each of the many fleets of tests. Those that are about it unset this variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_DASHBOARD__ENABLED", "false")
        yield


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a case by its values."""
    return name_of(val)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Mark what `one_in` leaves to `make test-long`, let marks select tests, and let those of fleets start first."""
    cases: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % mark.args[0]:
                item.add_marker(pytest.mark.thorough)
            cases[test] += 1
    yield
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = _fleets_first(items, workers)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say with each failure what the threads of this process do, those of libraries too; see proc(5)."""
    report = yield
    if report.failed:
        threads = sorted(Path("/proc/self/task").iterdir())
        what = ("comm", "wchan", "syscall")
        lines = [" ".join([thread.name, *(_read(thread / name).strip() for name in what)]) for thread in threads]
        report.sections.append(("Threads", "\n".join(lines)))
    return report


def _fleets_first(items: list[pytest.Item], parts: int) -> list[pytest.Item]:
    """Order `items` so that each of `parts` pieces of one size begins with tests of fleets, whole files of them.

    They take longest. pytest-xdist gives such a piece to each of its workers, and the end of the longest to whoever is
    idle: a fleet there would run alone for a while.
    """
    files = {item.path for item in items if item.get_closest_marker("chaos") or item.get_closest_marker("slow")}
    begins: list[list[pytest.Item]] = [[] for _ in range(parts)]
    for number, file in enumerate(sorted(files)):
        begins[number % parts] += (item for item in items if item.path == file)
    others = iter([item for item in items if item.path not in files])
    size = -(-len(items) // parts)
    return [item for begin in begins for item in (*begin, *islice(others, max(0, size - len(begin))))]


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
