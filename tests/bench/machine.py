"""The machine that a measurement ran on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from typing import Any


def machine() -> dict[str, Any]:
    """Return what a file of results says of it."""
    return {
        "cores": os.cpu_count(),
        "load_average_1m": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "unix_s": datetime.now(UTC).timestamp(),
    }
