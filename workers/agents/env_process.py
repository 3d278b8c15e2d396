"""A process of envs of several agents: `python -m headrace.workers.agents.env_process DESCRIPTOR`.

It is the process of `envs.process.child`, but packs multi-agent envs, so that a driver steps them like any other.
"""

from __future__ import annotations

from headrace.workers.agents.packed_env import build_any_env
from headrace.workers.envs.process.child import main

AGENTS_CHILD = "headrace.workers.agents.env_process"
"""The module that is run as the process."""

if __name__ == "__main__":
    main(build_any_env)
