"""The golden digests of chunks: which there are, and the making of those that are missing.

    python tests/golden/golden_chunks.py [WORD ...]

plays the cases that `chunks.json` lacks (those with one of the words in their name) and adds their digests. A case that
is there stays as it is. To record one again, delete its entry first, and say in the commit what changed and why.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import xxhash
from fingerprints import canonical
from golden_cases import CASES
from golden_play import Hosts, play

from headrace.schemas.chunks.spaces import Box, Discrete, Spaces
from headrace.workers.modules import actor_critic, lstm_actor_critic

PATH = Path(__file__).parent / "chunks.json"
PROBE = "probe"


def read() -> dict[str, Any]:
    """Return all recorded digests by case, and that of the probe."""
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def write(recorded: dict[str, Any]) -> None:
    """Write all digests, a case in four lines."""
    entries = []
    for name in sorted(recorded):
        value = recorded[name]
        if isinstance(value, dict):
            lines = [f"    {json.dumps(key)}: {json.dumps(value[key])}" for key in sorted(value)]
            entries.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
        else:
            entries.append(f"  {json.dumps(name)}: {json.dumps(value)}")
    PATH.write_text("{\n" + ",\n".join(entries) + "\n}\n")


def probe() -> str:
    """Return a digest of how this machine rounds: matrices, recurrent cells, sums and functions of floats.

    Where it differs from the recorded one, cases that are not exact cannot be compared.
    """
    torch.set_num_threads(1)
    spaces = Spaces(observation=Box(shape=(4,), dtype="<f4"), action=Discrete(n=2))
    random = np.random.default_rng(5)
    values: list[Any] = []
    for rows in (1, 2, 3, 4, 6):
        obs = torch.from_numpy(random.normal(size=(rows, 4)).astype(np.float32))
        state = {name: torch.from_numpy(random.normal(size=(rows, 64)).astype(np.float32)) for name in "hc"}
        with torch.inference_mode():
            values.append(dict(actor_critic(spaces).forward_inference({"obs": obs})))
            values.append(dict(lstm_actor_critic(spaces).forward_inference({"obs": obs, "state_in": state})))
    table = random.normal(size=(37, 5))
    values += [np.cos(table), np.exp(table), np.sqrt(np.abs(table)), table.mean(0), table.var(0), table.sum(1)]
    cart = gym.make("CartPole-v1")
    values.append(cart.reset(seed=3)[0])
    values += [cart.step(step % 2)[0] for step in range(20)]
    cart.close()
    digest = xxhash.xxh3_64()
    for piece in canonical(values):
        digest.update(piece)
    return digest.hexdigest()


def add_new(words: list[str]) -> None:
    """Play the cases that are missing, and write their digests."""
    recorded = read()
    here = probe()
    rounds_alike = recorded.setdefault(PROBE, here) == here
    with Hosts() as hosts:
        for name, case in CASES.items():
            if name not in recorded and (not words or any(word in name for word in words)):
                if not (case.exact or rounds_alike):
                    raise SystemExit(f"error: {name}: this machine rounds otherwise than the one that recorded")
                recorded[name] = play(case, hosts)
                sys.stdout.write(f"{name}\n")
                write(recorded)


if __name__ == "__main__":
    logging.disable()  # envs that fail are meant to
    warnings.simplefilter("ignore")
    add_new(sys.argv[1:])
