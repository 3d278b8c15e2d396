"""A worker with silent clients leaves soon after a stop request, and delivers the steps that they made."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from headrace.learner_stub import EpisodeStream
from headrace.schemas.accounts.ledger import add_up
from headrace.workers.serving.client import PolicyClient
from support.pipeline.delivery import BrokerThread, Witness, worker_process
from support.pipeline.worker_threads import AT_RANDOM, closed_row, drain, in_run
from support.waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.chaos


def test_a_worker_with_a_silent_client_stops_before_its_fragment_is_old(broker: BrokerThread, tmp_path: Path) -> None:
    silent = {**AT_RANDOM["sampling"], "external_fragment_max_age_s": 250.0}
    fleet, address = in_run(tmp_path, "clients")
    sections = {**AT_RANDOM, "fleet": fleet, "sampling": silent, "serving": {"enabled": True}}
    with (
        EpisodeStream(broker.endpoints.learner) as stream,
        worker_process(tmp_path, broker.endpoints.worker, 0, 1, sections) as worker,
        PolicyClient(address, connect_timeout_s=TIMEOUT_S) as client,
    ):
        episode, witness = client.start_episode(), Witness()
        for _ in range(4):
            client.get_action(episode, np.zeros(4, np.float32))
        worker.signal(signal.SIGTERM)
        wait_until(lambda: drain(stream, witness.see_any) or worker.popen.poll() is not None, "its end")
        row = closed_row(broker, take=lambda: drain(stream, witness.see_any))
    assert worker.wait() == 0
    assert row.totals.stepped == 3
    assert (row.settled.committed[0], row.totals.discarded) == (3, {})
    assert add_up(broker.rows()).balance() == 0
