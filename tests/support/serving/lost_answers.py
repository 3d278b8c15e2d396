"""Calls of a client whose request or answer is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace.schemas.errors import UnreachableError
from headrace.workers.serving.client.connection import Connection


@contextmanager
def unanswered(*, taken: bool) -> Iterator[None]:
    """The calls of the body get no answer; the server takes them, or not."""

    def lose(connection: Connection, request: Any, timeout_s: float, *rest: Any) -> Any:
        if taken:
            ask(connection, request, timeout_s, *rest)
        raise UnreachableError("policy server", "nowhere", timeout_s)

    ask, lost = Connection.ask, pytest.raises(UnreachableError)
    with pytest.MonkeyPatch.context() as patch, lost:
        patch.setattr(Connection, "ask", lose)
        yield
