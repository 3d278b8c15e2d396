"""Connectors that misbehave."""

from __future__ import annotations

from typing import Any

from headrace.schemas.spaces import Spaces
from headrace.workers.connectors import (
    Connector,
    Rows,
)


class FailingConnector(Connector):
    """Raises at the `fails_at`th rows, or when it is asked to make room."""

    fails_at = 0
    widens = True

    def __init__(self) -> None:
        self.calls = 0

    def connect(self, spaces: Spaces, width: int) -> Spaces:
        return spaces

    def process(self, rows: Rows) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise ZeroDivisionError("no mass")
        return dict(rows.columns)

    def widen(self, width: int) -> None:
        if not self.widens:
            type(self).widens = True
            raise MemoryError("no room")
