"""Decides whether a run of the tests passed; tries each test that failed again, alone.

Usage: python .ci/second_try.py LOG

LOG is what `pytest --report-log=LOG` wrote. Each failed test gets up to two more tries, one after another, each in a
pytest of its own. A test that passes then is flaky: it is named, and the run counts as passed. A run with more than
five failed tests gets no second try. Exit 0: passed. Exit 1: did not, and the last line says why.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST_FLAKY = 5
TRIES = 2
# A test alone has the whole machine. One that hangs in each try must not use up the time of the whole run.
TIMEOUT_S = 300
TESTS_FAILED = 1
"""pytest's exit status when all tests ran and some failed; see https://docs.pytest.org/en/stable/reference/exit-codes.html."""


def main() -> int:
    """Print the time by folder, try failed tests again, and return the exit code."""
    entries = list(read(Path(sys.argv[1])))
    status = next((entry["exitstatus"] for entry in entries if "exitstatus" in entry), None)
    failures = dict(first_errors(entries))
    print_times(entries)
    if status == 0:
        return 0
    if status != TESTS_FAILED or not failures:
        print(f"FAILED the tests did not run to their end (pytest's exit status: {status})")
        return 1
    if len(failures) > MOST_FLAKY:
        print(
            f"FAILED {len(failures)} tests; with more than {MOST_FLAKY} there is no second try: {', '.join(failures)}"
        )
        return 1
    failed_again = [test for test in failures if not passes_alone(test)]
    for test, error in failures.items():
        print(f"{'FAILED' if test in failed_again else 'FLAKY'} {test} - {error}")
    if failed_again:
        print(f"FAILED also alone: {', '.join(failed_again)}")
    return 1 if failed_again else 0


def read(log: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of the log; none if pytest did not get as far as writing one."""
    if log.exists():
        for line in log.read_text().splitlines():
            yield json.loads(line)


def first_errors(entries: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield each failed test, or file that could not be collected, with the first line of its first error."""
    named = set()
    for entry in entries:
        test = entry.get("nodeid")
        if entry.get("outcome") == "failed" and test not in named:
            named.add(test)
            error = entry["longrepr"]
            text = error["reprcrash"]["message"] if isinstance(error, dict) and error.get("reprcrash") else str(error)
            yield test, text.strip().partition("\n")[0]


def passes_alone(test: str) -> bool:
    """Try `test` again with nothing beside it, up to `TRIES` times."""
    for number in range(1, TRIES + 1):
        print(f"second try, {number} of {TRIES}: {test}", flush=True)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--timeout={TIMEOUT_S}", test]
        if subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode == 0:
            return True
    return False


def print_times(entries: list[dict[str, Any]]) -> None:
    """Print how many tests each folder has, and the sum of their seconds."""
    seconds: dict[str, float] = defaultdict(float)
    tests: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        if "duration" in entry:
            folder = str(Path(entry["nodeid"].partition("::")[0]).parent)
            seconds[folder] += entry["duration"]
            tests[folder].add(entry["nodeid"])
    for folder in sorted(seconds, key=seconds.__getitem__, reverse=True):
        print(f"{seconds[folder]:8.0f} s  {len(tests[folder]):5} tests  {folder}")


if __name__ == "__main__":
    sys.exit(main())
