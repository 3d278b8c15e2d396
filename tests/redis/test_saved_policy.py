"""Weights in Redis, as `headrace serve` and `load_policy` find them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.broker.redis.blob import weights_in
from headrace.deploy import load_policy
from headrace.deploy.run.fleet_file import FleetFile
from headrace.deploy.trained.saved_policy import find_policy
from headrace.learner_stub.checkpoints.checkpoint import published_arrays
from headrace.schemas.errors import CheckpointError, ConfigError, RedisUnavailableError
from headrace.schemas.messages.weights import encode_weights
from support.fleets.saved_runs import MEAN_STD, arrays_of, best_action, cart_module


def test_weights_are_found_by_the_fleets_name_and_by_its_run_directory(
    client: Any, fleet_id: str, url: str, tmp_path: Any, free_port: int
) -> None:
    arrays = {"w": np.arange(3.0)}
    assert weights_in(client, fleet_id).store((3, 5), encode_weights(fleet_id, (3, 5), arrays)) == "flipped"
    FleetFile(fleet_id=fleet_id, redis_url=url).write(tmp_path / "fleet.json")
    for where, name in ((url, fleet_id), (str(tmp_path), "")):
        found = find_policy(where, name)
        assert found.version == (3, 5)
        np.testing.assert_array_equal(found.arrays["w"], arrays["w"])
        assert "weights 3/5" in found.source
    module = cart_module(7)
    arrays = published_arrays(arrays_of(module))
    assert weights_in(client, fleet_id).store((3, 6), encode_weights(fleet_id, (3, 6), arrays)) == "flipped"
    policy = load_policy(url, fleet_id=fleet_id, settings={"sampling.env_to_module": [MEAN_STD]})
    assert policy.version == (3, 6)
    assert policy.act(arrays["head.weight"][0, :4]) == best_action(module, arrays["head.weight"][0, :4])
    with pytest.raises(ConfigError, match="--fleet-id"):
        find_policy(url, "")
    with pytest.raises(CheckpointError, match=r"it has no weights"):
        find_policy(url, f"{fleet_id}-other")
    with pytest.raises(RedisUnavailableError):
        find_policy(f"redis://127.0.0.1:{free_port}", "any")
