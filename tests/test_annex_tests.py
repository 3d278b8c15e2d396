"""`make check` runs what a change can break: `.ci/annex_tests.py` leaves out the tests of annexes beyond the change."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import TIMEOUT_S

FILES = {
    ".ci/budget.toml": "[annexes]\n'env hosts' = ['workers/hosts']\nwatch = ['deploy/watch']\n",
    "broker/process.py": "",
    "workers/hosts/pool.py": "",
    "deploy/watch/page.py": "",
    "tests/broker/test_broker.py": "import headrace.broker.process\n",
    "tests/workers/test_hosts.py": "import headrace.workers.hosts.pool\n",
    "tests/deploy/test_page.py": "import headrace.broker.process\nfrom headrace.deploy.watch import page\n",
    "tests/deploy/test_both.py": "import headrace.deploy.watch.page, headrace.workers.hosts.pool\n",
}


@pytest.fixture
def checkout(tmp_path: Path, root: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(root / ".ci" / "annex_tests.py", tmp_path / ".ci")
    who = "-c user.name=a -c user.email=a@b"
    commands = f"git init -q -b main && git add -A && git {who} commit -q -m one && git checkout -q -b mine"
    subprocess.run(commands, shell=True, cwd=tmp_path, check=True, timeout=TIMEOUT_S)
    return tmp_path


def arguments(checkout: Path, *asked: str) -> tuple[int, list[str]]:
    command = [sys.executable, ".ci/annex_tests.py", *asked]
    result = subprocess.run(command, cwd=checkout, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    return result.returncode, result.stdout.split()


@pytest.mark.parametrize(
    ("changed", "left_out"),
    [
        ([], []),
        (["deploy/watch/page.py"], ["--ignore=tests/workers/test_hosts.py"]),
        (["deploy/watch/new_file.py"], ["--ignore=tests/workers/test_hosts.py"]),
        (["workers/hosts/pool.py"], ["--ignore=tests/deploy/test_page.py"]),
        (["workers/hosts/pool.py", "deploy/watch/page.py"], []),
        (["workers/hosts/pool.py", "tests/deploy/test_page.py"], []),
        (["deploy/watch/page.py", "broker/process.py"], []),
        (["tests/deploy/test_page.py"], []),
    ],
)
def test_a_change_of_annexes_leaves_out_the_tests_of_the_others(
    checkout: Path, changed: list[str], left_out: list[str]
) -> None:
    for name in changed:
        with (checkout / name).open("a") as file:
            file.write("# changed\n")
    assert arguments(checkout) == (0, left_out)


def test_an_annex_has_tests_of_its_own(checkout: Path) -> None:
    assert arguments(checkout, "watch") == (0, ["tests/deploy/test_both.py", "tests/deploy/test_page.py"])
    assert arguments(checkout, "env_hosts") == (0, ["tests/deploy/test_both.py", "tests/workers/test_hosts.py"])
    assert arguments(checkout, "main_house") == (0, ["tests/broker/test_broker.py"])
    assert arguments(checkout, "wach") == (2, [])


def test_each_annex_of_this_project_has_tests(root: Path) -> None:
    for name in ("chaos", "doctor", "env_hosts", "policies", "ray", "serving", "slurm", "watch"):
        code, files = arguments(root, name)
        assert (code, bool(files)) == (0, True), name
