"""A process of envs of several agents: `python -m headrace.workers.agents.env_process DESCRIPTOR`.

It works like `envs.process.child`, and also packs multi-agent envs, so that a driver steps them like other envs.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # scanning objects that stay takes a fifth of the import time

from headrace.workers.agents.packed_env import build_any_env
from headrace.workers.envs.process.child import main

if __name__ == "__main__":
    main(build_any_env)
