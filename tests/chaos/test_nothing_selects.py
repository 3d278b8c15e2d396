"""Fleets whose bad episodes look odd deliver them like all others: each once, with the return that the env noted."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.schemas.chunks.chunk import ChunkEnd

pytestmark = pytest.mark.thorough

SHARES = (0.0, 0.1, 0.95)
HOSTS = {"sampling.env_placement": "remote", "fleet.env_hosts": 2, "sampling.remote_env_batch_wait_ms": 1}
PLACES: dict[str, dict[str, Any]] = {"inline": {}, "processes": {"sampling.env_placement": "process"}, "hosts": HOSTS}
LANDER = pytest.mark.skipif(find_spec("Box2D") is None, reason="needs Box2D: pip install 'gymnasium[box2d]'")


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("place", PLACES)
def test_a_nan_in_the_infos_of_bad_episodes_costs_none(tmp_path: Path, place: str, share: float) -> None:
    delivers_what_was_lived(tmp_path, "goal", {"share": share, "odd": "info"}, PLACES[place])


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("place", ["inline", "processes"])
def test_an_observation_outside_its_box_in_bad_episodes_costs_none(tmp_path: Path, place: str, share: float) -> None:
    delivers_what_was_lived(tmp_path, "goal", {"share": share, "odd": "box"}, PLACES[place])


@LANDER
@pytest.mark.parametrize("share", SHARES)
def test_a_lander_that_flies_out_of_its_box_is_delivered(tmp_path: Path, share: float) -> None:
    delivers_what_was_lived(tmp_path, "lander", {"share": share}, {})


def delivers_what_was_lived(folder: Path, env: str, env_config: dict[str, Any], settings: dict[str, Any]) -> None:
    """Run a fleet to 10,000 steps without training. Compare what its learner got with the envs' own notes."""
    notes = folder / "lived"
    notes.mkdir()
    delivered: dict[str, float] = {}
    with headrace.fleet(
        f"support.envs.selecting:{env}",
        workers=2,
        num_envs=4,
        seed=0,
        env_config={**env_config, "lived": str(notes)},
        until_steps=10_000,
        run_dir=folder / "run",
        settings=settings,
    ) as run:
        with run.stream() as stream, run.weights() as weights:
            weights.publish(headrace.actor_critic(stream.spaces()).state_dict())
            for batch in stream:
                for chunk in batch:
                    if chunk.is_done and chunk.end is not ChunkEnd.ABORTED:  # as those under way at the goal are
                        name = chunk.infos[-1]["lived"]
                        assert name not in delivered, "an episode is delivered once"
                        delivered[name] = chunk.episode_return
        run.close()
        summary = run.summary
    assert (summary["balanced"], summary["ledger"]["dropped"]) == (True, {})
    assert set(summary["ledger"]["discarded"]) <= {"shutdown"}, "no step is lost by how its episode went"
    lived = dict(line.split() for file in notes.iterdir() for line in file.read_text().splitlines())
    returns = {name: float(earned) for name, earned in lived.items()}
    assert delivered == pytest.approx({name: returns[name] for name in delivered}, rel=1e-4), "rewards are float32"
    assert len(delivered) > 0.8 * len(returns), "the others were under way at the goal"
    values = np.array(list(returns.values()))
    error = 2 * values.std() / np.sqrt(len(delivered))
    assert abs(np.mean(list(delivered.values())) - values.mean()) <= error + 1e-9
