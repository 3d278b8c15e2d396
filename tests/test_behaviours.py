"""`behaviours.md` has a row for every behaviour, and names only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
_ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (TESTS / "behaviours.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| D?\d+ \|", line)
]
_NAMED = sorted({name for row in _ROWS for name in re.findall(r"`([\w/]+\.py(?:::\w+)?)`", row[-1])})


def test_every_behaviour_and_every_defect_has_its_row() -> None:
    wanted = [str(number) for number in range(1, 129)]
    wanted += [f"D{number}" for number in range(1, 26)]
    assert [row[0] for row in _ROWS] == wanted


def test_every_row_says_something_and_names_a_test() -> None:
    assert [row[0] for row in _ROWS if len(row) != 3 or not row[1] or not row[2].startswith("`")] == []


@pytest.mark.parametrize("name", _NAMED)
def test_each_named_test_exists(name: str) -> None:
    path, _, function = name.partition("::")
    text = (TESTS / path).read_text(encoding="utf-8")
    assert not function or re.search(rf"^def {function}\(", text, re.MULTILINE), f"{path} has no {function}"
