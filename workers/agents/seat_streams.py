"""Saves and restores the random streams of seats as arrays, also for agents that appear later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.schemas.errors import StateError
from headrace.workers.agents.module_seats import ModuleSeats
from headrace.workers.randomness.seeds import BLOCK, SEAT_USES, SeatStreams, check_array, read_streams, write_streams

Modules = Mapping[str, ModuleSeats]


def read_seats(streams: SeatStreams, modules: Modules) -> dict[str, Any]:
    """Return the state of all seats' streams.

    entropy: uint8, little-endian, and incarnation: the root for the streams of new seats.

    keys: int64 (streams, 4), (env, use, module, agent) of each known stream; streams: uint64 (streams, 6). modules: by
    id, the agents that have seats, int64, and by use the numbers drawn for them, ordered by agent, then by env.
    """
    entropy = streams.entropy
    return {
        "entropy": np.frombuffer(entropy.to_bytes((entropy.bit_length() + 7) // 8, "little"), np.uint8),
        "incarnation": streams.incarnation,
        "keys": np.array(list(streams.known), np.int64).reshape(-1, 4),
        "streams": read_streams(list(streams.known.values())).reshape(-1, 6),
        "modules": {
            module_id: {
                "agents": np.array(module.agents, np.int64),
                **{use: noise.read() for use, noise in module.policy.noise.rows.items()},
            }
            for module_id, module in modules.items()
        },
    }


def write_seats(streams: SeatStreams, modules: Modules, state: Mapping[str, Any]) -> None:
    """Continue from the state of `read_seats`. Agents with seats here only begin as they would have begun there."""
    streams.restart(int.from_bytes(state["entropy"].tobytes(), "little"), state["incarnation"])
    keys = [tuple(key) for key in state["keys"].tolist()]
    write_streams([streams.at(key) for key in keys], state["streams"])
    drawn = set()
    for module_id, known in state["modules"].items():
        module, agents = modules[module_id], known["agents"].tolist()
        rows = module.rows_of(agents)
        module.policy.noise.begin_again()
        for use, noise in module.policy.noise.rows.items():
            noise.write(rows, known[use]["numbers"], known[use]["used"])
        drawn |= {(module.index, agent) for agent in agents}
    # `begin_again` drew from streams whose numbers `state` holds already, so set these streams back.
    again = [i for i, key in enumerate(keys) if key[2:] in drawn]
    write_streams([streams.at(keys[i]) for i in again], state["streams"][again])


def check_seats(modules: Modules, num_envs: int, num_agents: int, state: Any) -> None:
    """Raise `StateError` unless `write_seats` can take `state`."""
    check_array(state, "seats", "entropy", np.uint8, (None,))
    keys = check_array(state, "seats", "keys", np.int64, (None, 4))
    check_array(state, "seats", "streams", np.uint64, (len(keys), 6))
    known, incarnation = state.get("modules"), state.get("incarnation")
    if not isinstance(incarnation, int) or incarnation < 0:
        raise StateError(f"random_streams/seats/incarnation should be a whole number, got {incarnation!r:.80}")
    if not isinstance(known, Mapping) or known.keys() != modules.keys():
        seen = list(known) if isinstance(known, Mapping) else known
        raise StateError(
            f"random_streams/seats is of the modules {seen!r:.200}; this runner has {list(modules)!r:.200}"
        )
    _check_range("keys", keys, (num_envs, max(SEAT_USES.values()) + 1, len(modules), num_agents))
    for module_id, module in modules.items():
        _check_module(module, num_envs, num_agents, known[module_id])


def _check_module(module: ModuleSeats, num_envs: int, num_agents: int, state: Any) -> None:
    name = f"seats/{module.module_id}"
    agents = check_array(state, name, "agents", np.int64, (None,))
    _check_range(f"{module.module_id}/agents", agents, num_agents)
    rows = len(agents) * num_envs
    for use, noise in module.policy.noise.rows.items():
        drawn = state.get(use)
        check_array(drawn, f"{name}/{use}", "numbers", np.float32, (rows, BLOCK, noise.size))
        used = check_array(drawn, f"{name}/{use}", "used", np.int64, (rows,))
        _check_range(f"{module.module_id}/{use}/used", used, BLOCK)


def _check_range(name: str, numbers: Any, limit: Any) -> None:
    if (numbers < 0).any() or (numbers >= limit).any():
        raise StateError(f"random_streams/seats/{name} should be from 0 to below {limit}; the state is of another env")
