"""Fuzzing of the values in Redis: each reader leaves out and names values that break the table of keys."""

from __future__ import annotations

import io
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import golden_samples
import numpy as np
import orjson
import redis
from fuzz.mutations import Mutator, as_json
from fuzz.run_files import ROW
from fuzz.teacher import KEPT
from rich.console import Console

from headrace.broker.batches.limits import BrokerLimits, BrokerState
from headrace.broker.redis.blob import weights_in
from headrace.broker.redis.client import connect
from headrace.broker.reports.report import read_saved_state
from headrace.broker.reports.worker_metrics import WorkerMetrics
from headrace.broker.sessions.core import BrokerCore
from headrace.deploy.annexes.chaos import deep_audit
from headrace.deploy.fleet.checkpoint_copy import CheckpointCopier, choose_checkpoint
from headrace.deploy.report import ps
from headrace.deploy.report.audit import audit, render, warnings
from headrace.deploy.report.progress import ProgressView
from headrace.deploy.report.run_rows import fleet_row, learner_row
from headrace.deploy.run.fleet_file import FleetFile
from headrace.deploy.run.goal import Goal, RunNumbers
from headrace.deploy.run.redis_server import prepare_redis, wait_ready
from headrace.deploy.run.redis_view import FleetView
from headrace.deploy.trained.saved_policy import find_policy
from headrace.learner_stub.checkpoints.checkpoint import CHECKPOINT_FILE, Checkpoint, save_checkpoint
from headrace.schemas.accounts import redis_keys as keys
from headrace.schemas.accounts.consumer_groups import GroupRow
from headrace.schemas.accounts.folded_lives import fold
from headrace.schemas.accounts.logged_metrics import LoggedMetric, SumsOfLife
from headrace.schemas.errors import DecodeError, HeadraceError, RedisUnavailableError
from headrace.schemas.frames.wire import decode
from headrace.schemas.messages.weights import encode_weights, read_weights

FLEET = "fuzzed"
ROUND = 12
_START_S = 60.0

Hash = dict[str, Any]


def honest_hashes() -> dict[str, Hash]:
    """The hashes of a small fleet, by the name of their key. A value that is no text stands for its JSON."""
    folded = fold(None, ROW, {"accepted_bytes_total": 90})
    assert folded is not None
    newest = ROW.model_copy(update={"incarnation": 3, "closed": False})
    worker = {
        "incarnation": 3,
        "host": "h",
        "pid": os.getpid(),
        "weights_behind": 2,
        "env_failures": 1,
        "env_failure_age_s": 2.5,
        "env_failure": "x",
        "tasks_refused": "x",
    }
    returns = {"return_mean": 1.5, "return_min": 0.0}
    return {
        "fleet": {"reported_unix_s": "1.5", "protocol": "1.0"},
        "ledger": {"3/3": as_json(newest.model_dump())},
        "folded": {"3": as_json(folded.model_dump())},
        "totals": {
            "accepted_agent_steps_total": "9",
            "episodes_total": "2",
            'dropped_agent_steps_total{reason="stale"}': "1",
        },
        "sources": {"3/3/accepted_agent_steps_total": "9", "3/0/accepted_agent_steps_total": "9"},
        "gauges": {"env_steps_per_s": "1.5", "weights_seq": "7", "episodes_window": "2", "episode_return_mean": "1"},
        "workers": {"3": worker},
        "lease": {"epoch": "2", "token": "x", "since_unix_s": "1.5", "connected": "1"},
        "consumer_groups": {"record": as_json(golden_samples.sample_model(GroupRow).model_dump())},
        "group_ledger": {"record/3/3": as_json(newest.model_dump())},
        "group_folded": {"record/3": as_json(folded.model_dump())},
        "incarnations": {"3": "3"},
        "runner_state": {"3": {"num_episodes_lifetime": 2, "num_agent_steps_sampled_lifetime": {"a": 3}}},
        "metrics": {"score": as_json(golden_samples.sample_model(LoggedMetric).model_dump())},
        "metric_sums": {"3": as_json(golden_samples.sample_model(SumsOfLife).model_dump())},
        "policies": {"default_policy": returns},
        "tasks": {"newest": as_json(KEPT.model_dump())},
        "task_figures": {'{"level":3}': {"episodes": 9, "env_failures": 1, "return_mean": 0.5, "last_unix_s": 1.5}},
    }


class RedisValues:
    """A Redis with the keys of one fleet, and what reads them."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self._client: Any = redis.Redis.from_url(url, protocol=2)
        self._path = folder / CHECKPOINT_FILE
        self._folder = folder
        self._tables = {key.name: key for key in keys.TABLE}
        self._fill()
        self._honest: dict[bytes, bytes] = {key: self._client.dump(key) for key in self._client.scan_iter()}

    def _fill(self) -> None:
        for name, content in honest_hashes().items():
            text = {k: v if isinstance(v, str) else orjson.dumps(v) for k, v in content.items()}
            self._client.hset(keys.key_name(FLEET, self._tables[name]), mapping=text)
        row = {"weights_seq": "1", "unix_s": "1.5", "env_steps": "9", "values": b'{"loss": 0.5}'}
        self._client.xadd(keys.key_name(FLEET, keys.LEARNER_ROWS), row, id="1-5")
        frames = encode_weights(FLEET, (2, 7), {"w": np.ones((2, 3), np.float32)})
        weights_in(self._client, FLEET).store((2, 7), frames)
        save_checkpoint(self._path, Checkpoint(2, [], {"updates": 1}, {"module/w": np.ones(3)}))
        copier = CheckpointCopier(self._path, self.url, FLEET, 1 << 40, lambda: 9)
        copier.finish()
        copier.join(_START_S)

    def mend(self) -> None:
        """Put the honest keys back."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.flushall()
            for key, dumped in self._honest.items():
                pipe.restore(key, 0, dumped)
            pipe.execute()

    def break_some(self, mutator: Mutator) -> str:
        """Change one to three keys. Return the name of the first."""
        names = mutator.random.choices(sorted(self._honest), k=mutator.random.choice((1, 1, 2, 3)))
        for name in names:
            self._break(name, mutator)
        return names[0].decode().rpartition(":")[2].partition("{")[0]

    def _break(self, name: bytes, mutator: Mutator) -> None:
        rng, client = mutator.random, self._client
        kind = client.type(name)
        if kind not in (b"string", b"stream", b"hash"):  # it is gone or of another type already
            return
        if rng.random() < 0.1:
            client.delete(name)
            other: Callable[..., object] = rng.choice((client.set, client.rpush, client.sadd))
            other(name, b"x")
        elif kind == b"string":
            content = client.get(name)
            client.set(name, rng.choice((mutator.data(content), str(mutator.strange()).encode(errors="replace"))))
        elif kind == b"stream":
            _, fields = client.xrange(name)[-1]
            row = {k: self._text(v, mutator) for k, v in fields.items()}
            client.delete(name)
            client.xadd(name, row, id=f"{rng.choice((1, 2**40))}-6")
        else:
            fields = client.hgetall(name)
            field = rng.choice(sorted(fields))
            value = fields[field]
            if rng.random() < 0.2:
                field = rng.choice((mutator.data(field), str(mutator.strange()).encode(errors="replace")))
            client.hset(name, field, self._text(value, mutator))

    def _text(self, value: bytes, mutator: Mutator) -> bytes:
        try:
            return mutator.text(orjson.loads(value))
        except (orjson.JSONDecodeError, UnicodeDecodeError):
            return mutator.data(value)

    # -- readers ------------------------------------------------------------------------------------------------------

    def read_all(self) -> None:
        """Read everything as the broker and the commands do. Raises what they should never let out."""
        self._read_view()
        self._read_saved()
        _documented(self._read_deeply, RedisUnavailableError)
        _documented(lambda: find_policy(self.url, FLEET))
        self._path.unlink(missing_ok=True)
        choose_checkpoint(self._path, self.url, FLEET, None)

    def _read_deeply(self) -> None:
        with FleetView(self.url, FLEET) as view:
            sources = deep_audit.with_ledger(deep_audit.read_files(self._folder, FLEET), self._folder, view.read())
        deep_audit.disagreements(sources)
        deep_audit.table(sources)

    def _read_view(self) -> None:
        with FleetView(self.url, FLEET) as view:
            snapshot = view.read()
            rows = view.learner_rows()
        problems = audit(snapshot)
        Console(file=io.StringIO(), width=120).print(render(snapshot, problems, warnings(snapshot)))
        numbers = RunNumbers.of(snapshot.gauges, snapshot.totals, snapshot.policies)
        ProgressView(1.0, numbers, Goal(), snapshot=snapshot).rows()
        fleet_row(snapshot, {}, 1.5, 1.0)
        orjson.dumps([learner_row(row, 1.0) for row in rows], option=orjson.OPT_NON_STR_KEYS)
        fleet = FleetFile(fleet_id=FLEET, redis_url=self.url, supervisor_pid=os.getpid())
        seen, missing = ps.reported(fleet)
        shown = ps.all_processes(fleet, seen, 2.0)
        ps.table(fleet, shown, missing)
        orjson.dumps(shown)

    def _read_saved(self) -> None:
        saved = read_saved_state(connect(self.url, 2.0), FLEET)
        core = BrokerCore(FLEET, BrokerLimits(), BrokerState())
        core.restore(saved.rows.values(), saved.incarnations, saved.lease_epoch, saved.runner_state, saved.folded)
        core.tick(1.0)
        orjson.dumps([row.model_dump() for row in core.rows()])
        WorkerMetrics().go_on_from(saved.metric_sums)
        if saved.weights is not None:
            _documented(lambda: read_weights(decode(saved.weights.frames)), DecodeError)

    def read_honest(self) -> None:
        """Read what is as it should be: nothing of it is left out."""
        with FleetView(self.url, FLEET) as view:
            snapshot = view.read()
        assert not snapshot.garbage, snapshot.garbage
        assert (snapshot.totals["accepted_agent_steps_total"], snapshot.rows.keys()) == (9, {(3, 3)})


def _documented(read: Callable[[], object], error: type[HeadraceError] = HeadraceError) -> None:
    with suppress(error):
        read()


@contextmanager
def redis_values() -> Iterator[Callable[[int, Counter[str]], None]]:
    """Yield a function that reads some mutated values by a seed, from a Redis server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        launch = prepare_redis(Path(folder))
        with subprocess.Popen(launch.argv, stdout=subprocess.DEVNULL) as server:
            try:
                wait_ready(launch.url, _START_S)
                values = RedisValues(Path(folder), launch.url)

                def play(seed: int, said: Counter[str]) -> None:
                    mutator = Mutator(seed, "redis")
                    for _ in range(ROUND):
                        values.mend()
                        name = values.break_some(mutator)
                        values.read_all()
                        said[name] += 1
                    values.mend()
                    values.read_honest()

                yield play
            finally:
                server.kill()
