"""Settings: sections of fields, how files, environment and flags make them, and code that they name."""

from __future__ import annotations

ENV_PREFIX = "HEADRACE_"
"""How the names of environment variables with settings begin: HEADRACE_SECTION__KEY."""
