"""What an object owns ends when it is dropped, whatever thread drops it."""

from __future__ import annotations

import threading

import pytest

from headrace.schemas.basics import dropped
from headrace.schemas.basics.dropped import when_dropped
from support.waiting import TIMEOUT_S


class Owner:
    """Owns nothing."""


def test_what_a_dropped_object_owns_has_ended_when_del_returns_and_its_class_is_named() -> None:
    owner, ended = Owner(), list[str]()
    when_dropped(owner, "the owner was dropped", ended.append, "part")
    with pytest.warns(ResourceWarning, match="the owner was dropped"):
        del owner
    assert ended == ["part"]


def test_a_closed_object_is_dropped_in_silence() -> None:
    owner, ended = Owner(), list[str]()
    when_dropped(owner, "the owner was dropped", ended.append, "part").detach()
    del owner
    assert not ended


def test_a_thread_that_holds_what_the_end_needs_may_drop_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run in any thread at any time."""
    monkeypatch.setattr(dropped, "_WAIT_S", 0.01)
    owner, lock, ended = Owner(), threading.Lock(), threading.Event()

    def end() -> None:
        with lock:
            ended.set()

    when_dropped(owner, "the owner was dropped", end)
    with lock, pytest.warns(ResourceWarning, match="the owner was dropped"):
        del owner
    assert ended.wait(TIMEOUT_S)
