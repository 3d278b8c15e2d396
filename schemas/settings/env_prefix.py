"""How the names of environment variables with settings begin: HEADRACE_SECTION__KEY."""

from __future__ import annotations

ENV_PREFIX = "HEADRACE_"
