"""The default module, which takes its time for each step of training, and says by a file that it has begun one."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch

from headrace.workers.modules import actor_critic

MARK = "HEADRACE_TEST_SLOW_TRAINING"
"""Environment variable with the path of that file."""
STEP_S = 0.3


def build(spaces: Any) -> Any:
    """For `module.build`: only the learner trains, so only it is slow."""
    module = actor_critic(spaces)
    forward = module.forward_train

    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        if torch.is_grad_enabled():
            Path(os.environ[MARK]).touch()
            threading.Event().wait(STEP_S)
        return forward(batch)

    module.forward_train = slow
    return module
