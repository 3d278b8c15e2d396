"""Objects that a `with` block closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closable(ABC):
    """An owner of sockets, files or processes until `close`. A `with` block closes it at its end."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it owns."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
