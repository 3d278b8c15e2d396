"""What an env may do amiss, by the names that `troubled.FAULTS` has for it: the rows of every fault matrix."""

from __future__ import annotations

BAD_DATA = {
    "NaN reward": r"Reward should be finite scalar, got nan \(<class 'float'>\)",
    "infinite reward": "Reward should be finite scalar",
    "complex reward": "Reward should be finite scalar",
    "array reward": "Reward should be finite scalar",
    "list info": "info should be a dict",
    "observation of wrong shape": r"observation should be float32 \(3,\), got float32 \(2,\)",
    "observation of wrong dtype": "observation should be float32",
    "observation outside": "observation should be within",
    "ragged observation": "observation should be float32 .*ValueError",
    "observation that raises": "observation should be float32 .*no array of mine",
    "reward that raises": "Reward should be finite scalar, got a Touchy",
    "answer that raises": "answer of step should be .*got a Touchy",
    "wrong tuple": "answer of step should be",
}
"""Answers of `step`, and what is said of them."""

HANGS = ("hangs", "hangs with the lock")
DEATHS = {
    "segfaults": "signal SIGSEGV",
    "exits": "exit code 7",
    "is killed": "signal SIGKILL",
    "is signalled": "signal 40",
}
"""What ends an env's process, and as what it is told."""

BURDENS = ("floods", "leaves a child")
"""What an env may do to its machine without a failure."""
