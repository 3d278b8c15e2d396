"""The second try of `.ci/run`: a flaky test is named and passes; a test that always fails is named last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import TIMEOUT_S

FAILS_ONCE = """
import pathlib
def test_it(request):
    tried = pathlib.Path(__file__).with_suffix(".tried")
    before = tried.exists()
    tried.touch()
    assert before, "the first try fails"
"""
FAILS = "def test_it():\n    assert 1 == 2, 'always'\n"
PASSES = "def test_it(): pass\n"
CANNOT_BE_READ = "import no_such_module\n"


def judge(folder: Path, root: Path, **files: str) -> tuple[int, list[str]]:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").touch()
    run = [sys.executable, "-m", "pytest", "-n", "1", "--report-log=log"]
    subprocess.run(run, cwd=folder, check=False, capture_output=True, timeout=TIMEOUT_S)
    command = [sys.executable, str(root / ".ci" / "second_try.py"), "log"]
    result = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    return result.returncode, result.stdout.splitlines()


def test_a_flaky_test_passes_and_is_named_with_its_first_error(tmp_path: Path, root: Path) -> None:
    code, lines = judge(tmp_path, root, flaky=FAILS_ONCE, good=PASSES)
    assert (code, lines[-1]) == (0, "FLAKY test_flaky.py::test_it - AssertionError: the first try fails")
    assert any(line.split()[2:] == ["2", "tests", "."] for line in lines)


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("text", "named"), [(FAILS, "test_bad.py::test_it"), (CANNOT_BE_READ, "test_bad.py")])
def test_a_test_that_fails_alone_too_is_named_last(text: str, named: str, tmp_path: Path, root: Path) -> None:
    code, lines = judge(tmp_path, root, bad=text, good=PASSES)
    assert (code, lines[-1]) == (1, f"FAILED also alone: {named}")


def test_more_than_five_failed_tests_get_no_second_try(tmp_path: Path, root: Path) -> None:
    code, lines = judge(tmp_path, root, **{f"flaky_{number}": FAILS_ONCE for number in range(6)})
    assert code == 1
    assert lines[-1].startswith("FAILED 6 tests; with more than 5 there is no second try: ")


def test_tests_that_never_ran_count_as_failed(tmp_path: Path, root: Path) -> None:
    command = [sys.executable, str(root / ".ci" / "second_try.py"), str(tmp_path / "log")]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (result.returncode, result.stdout) == (
        1,
        "FAILED the tests did not run to their end (pytest's exit status: None)\n",
    )
