"""Makes `toy_envs` importable, by these tests and as "toy_envs:make_counting" by the code under test."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
