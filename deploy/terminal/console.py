"""Tables and live displays of rich, with foreign text made fit for a terminal, as `say` makes lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType  # noqa: TID251 - made fit here
from rich.segment import Segment

from headrace.schemas.basics.printable import printable

FILE_WIDTH = 160
"""Columns in a file or a pipe, where no terminal bounds a table."""


class PrintableConsole(Console):
    """Shows what it is given as it is: no markup, no emoji codes, and control characters of a text as escapes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        width = None if stream.isatty() else FILE_WIDTH
        super().__init__(file=stream, width=width, markup=False, emoji=False, legacy_windows=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, also the parts of a table."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
