"""Envs that show pictures. They can be named in another process, where they need no torch."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from support.envs.counting import Counting


class Painter(Counting):
    """A picture of its index and time."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.render_mode = self.config.get("render_mode", "rgb_array")

    def render(self) -> Any:
        if self.t == 3:
            raise RuntimeError("no paint")
        return np.full((2, 3, 3), 10 * self.index + self.t, np.uint8)


class TallPainter(Painter):
    """Lane 1 is painted on too large a wall; lane 2's paint never dries."""

    def render(self) -> Any:
        if self.index == 2:
            threading.Event().wait()
        return np.zeros((3000, 3000, 3) if self.index == 1 else (2, 3, 3), np.uint8)
