"""Settings: sections of fields, how files, environment and flags make them, and code that they name."""

from __future__ import annotations

ENV_PREFIX = "HEADRACE_"
"""Prefix of the environment variables with settings: HEADRACE_SECTION__KEY."""
