"""The check of a learner's record finds each broken promise and nothing else."""

from __future__ import annotations

import pytest

from headrace.deploy.annexes.chaos.history import History, Line

LINES = [
    Line(1.0, 0, 1, 1, 5, [("a", 0, 0, 3, 0), ("b", 0, 0, 2, 1)]),
    Line(2.0, 0, 1, 2, 4, [("a", 1, 3, 4, 0)]),
    Line(3.0, 1, 1, 1, 1, [("c", 0, 0, 1, 2)]),
    Line(4.0, 0, 1, 4, 2, [("a", 2, 7, 1, 1), ("d", 0, 0, 1, 0)]),
    Line(5.0, 0, 1, 0, 0, [("d", 1, 1, 0, 3)]),
]
"""Two lives; batch 3 of the first was dropped by name, and episode d was aborted."""


def test_a_sound_record_has_no_problem() -> None:
    history = History().read(LINES)
    assert history.problems == []
    assert history.without_end() == {}
    assert (history.steps, history.episodes, history.aborted) == ({(0, 1): 11, (1, 1): 1}, 4, 1)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([LINES[0], LINES[0]], "batch 1 of slot 0 incarnation 1 came after batch 1"),
        ([LINES[0], LINES[1], LINES[0]], "batch 1 of slot 0 incarnation 1 came after batch 2"),
        ([LINES[0], LINES[3]], "due was chunk 1 at step 3"),
        ([LINES[0], LINES[1]._replace(chunks=[("a", 1, 2, 4, 0)])], "begins at step 2; due was chunk 1 at step 3"),
        ([LINES[0], LINES[1]._replace(chunks=[("b", 1, 2, 1, 0)])], "after the end of its episode"),
    ],
    ids=["twice", "order", "gap", "overlap", "after the end"],
)
def test_a_broken_promise_is_found(lines: list[Line], said: str) -> None:
    assert any(said in problem for problem in History().read(lines).problems)


def test_an_episode_without_its_end_is_counted() -> None:
    assert History().read(LINES[:-1]).without_end() == {(0, 1): 1}


def test_many_problems_are_counted_and_some_are_kept() -> None:
    history = History().read([LINES[0], *[LINES[0]] * 50])
    assert history.broken >= 50
    assert len(history.problems) == 20
