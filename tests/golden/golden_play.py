"""Plays a golden case: drives a runner through a script and digests what comes out, call by call and part by part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import numpy as np
from fingerprints import Fingerprint, add_lives, add_samples, counters, finished, without_clocks

from headrace.schemas.accounts.ledger import Discard
from headrace.schemas.chunks.batch import ChunkBatch
from headrace.schemas.chunks.chunk import EpisodeChunk
from headrace.workers import EnvRunnerConfig, MultiAgentEnvRunner, RunnerCallback, SingleAgentEnvRunner
from headrace.workers.envs import restarts

HERE = Path(__file__).parent

Settings = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One golden case: the settings of its runner, and the script that drives it.

    `exact`: all its numbers are integers or simple fractions, so every machine gives the same digests. `host`: the
    settings of the env host that serves its envs, if those are remote.
    """

    script: Callable[[Play], None]
    settings: Settings
    exact: bool = True
    several: bool = False
    events: bool = False
    host: Settings | None = None
    runner: Settings = field(default_factory=dict)


class Play:
    """One run of a case. Each call of the runner adds a line to `calls` and digests to the parts."""

    def __init__(self, case: Case, hosts: Hosts) -> None:
        self._case, self._hosts = case, hosts
        self._whole = Fingerprint()
        self._call = Fingerprint()
        self.calls: list[str] = []
        self.events = Events()
        self.runner: Any = self.new_runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.stop()

    def new_runner(self, **settings: Any) -> Any:
        """Return a runner of the case's settings and these."""
        given: Settings = {"seed": 7, "rollout_fragment_length": 8, "num_envs": 3}
        given |= self._case.settings | settings
        if self._case.host is not None:
            folder = self._hosts.socket_dir(self._case.host, self._case.runner.get("worker_index", 0))
            given |= {"env_placement": "remote", "socket_dir": folder}
        if self._case.events:
            given["callbacks"] = [self.events]
        kind = MultiAgentEnvRunner if self._case.several else SingleAgentEnvRunner
        return kind(EnvRunnerConfig(**given), **{"run_uid": "golden", **self._case.runner})

    # -- what a script may do -----------------------------------------------------------------------------------------

    def fragment(self, **settings: Any) -> Sequence[EpisodeChunk]:
        """Digest a fragment."""
        return self._add_samples(self.runner.sample_fragment(**settings), "fragment")

    def sample(self, **settings: Any) -> Sequence[EpisodeChunk]:
        """Digest a sample, whose chunks stand as they were cut."""
        with patch.object(ChunkBatch, "finished_first", lambda cut: cut):
            return self._add_samples(self.runner.sample(end_markers=True, **settings), "sample")

    def cut_fragment(self) -> None:
        """Digest the fragment as it stands."""
        self._add_samples(self.runner.cut_fragment(), "cut_fragment")

    def attempt(self, call: Callable[[], Any]) -> None:
        """Make the call, and digest the kind of error that it raises."""
        try:
            call()
        except Exception as error:
            self.note("error", type(error).__name__)
            self.note("totals", counters(self.runner.totals))

    def discard_open(self, reason: Discard) -> None:
        """Digest the end of sampling."""
        self._add_samples(self.runner.discard_open(reason), "discard_open")

    def lives(self, episodes: int) -> None:
        """Digest the first `episodes` of each env, wherever they are cut."""
        chunks: list[EpisodeChunk] = []
        wanted = range(self.runner.config.num_envs)
        while True:
            chunks += self.runner.sample_fragment()
            whole = {parts[0].episode_id: parts[0].env_index for parts in finished(chunks, episodes)}
            if all(list(whole.values()).count(env) == episodes for env in wanted):
                break
        add_lives(self._call, chunks, episodes)
        self._end_call("lives")

    def first_failures(self) -> None:
        """Digest the first failure of each env, and what its episode was aborted for."""
        found: dict[str, Any] = {}
        for event, episode, *more in self.events.take():
            if event in ("env_failed", "aborted"):
                found.setdefault(f"{event} {more[0]}", [episode and episode[0], *more])
        self.note("failures", found)

    def weights(self, seq: int, learner_epoch: int = 0, more: Settings | None = None) -> None:
        """Set other weights, which follow from those there are and from `seq`, and `more` beside them."""
        state, more = _moved(self.runner.get_state("rl_module")["rl_module"], seq), more or {}
        if self._case.several:
            state = {module: weights | more.get(module, {}) for module, weights in state.items()}
        else:
            state |= more
        self.runner.set_weights(state, seq=seq, learner_epoch=learner_epoch, digest=f"digest-{seq}")
        self.note("version", self.runner.weights_version)

    def move(self) -> None:
        """Go on in another runner, with the state of this one."""
        state = self.runner.get_state()
        self.note("state", state)
        self.runner.stop()
        self.runner = self.new_runner()
        self.runner.set_state(state)

    def make_env(self) -> None:
        """Build the envs again."""
        self.runner.make_env()

    def metrics(self) -> None:
        """Digest what the runner reports."""
        self.note("metrics", without_clocks(self.runner.get_metrics()))
        self.note("metrics", [self.runner.take_finished_episodes(), self.runner.get_counters()])

    def running(self) -> None:
        """Digest what is said of the episodes that go on."""
        self.note("running", [self._look(view) for view in self.runner.running_episodes()])

    def note(self, part: str, value: Any) -> None:
        """Digest a value as part of `part`."""
        self._call.add(part, value)
        self._end_call(part)

    # -- what comes of it ---------------------------------------------------------------------------------------------

    def _look(self, view: Any) -> list[Any]:
        return [view.episode_id, view.env_index, len(view), view.episode_return, view.seed]

    def _add_samples(self, samples: Sequence[EpisodeChunk], call: str) -> Sequence[EpisodeChunk]:
        add_samples(self._call, samples)
        self._call.add("totals", counters(self.runner.totals))
        if self._case.events:
            self._call.add("events", self.events.take())
        self._end_call(call)
        return samples

    def _end_call(self, call: str) -> None:
        digests = self._call.digests()
        for part, digest in digests.items():
            self._whole.add(part, digest)
        one = Fingerprint()
        one.add(call, digests)
        self.calls.append(f"{call} {one.digests()[call]}")
        self._call = Fingerprint()

    def digests(self) -> dict[str, Any]:
        """Return what the golden file has of a case."""
        return {"exact": self._case.exact, "calls": self.calls, "parts": self._whole.digests()}


def play(case: Case, hosts: Hosts) -> dict[str, Any]:
    """Return the digests of a case."""
    with patch.object(restarts, "BACKOFF_S", 0.0), Play(case, hosts) as run:
        case.script(run)
        return run.digests()


def _moved(state: Any, seq: int) -> Any:
    if isinstance(state, dict):
        return {name: _moved(part, seq) for name, part in state.items()}
    array = np.asarray(state)
    return array + array.dtype.type(seq / 8) if array.dtype.kind == "f" else array


class Events(RunnerCallback):
    """Keeps what callbacks are told."""

    def __init__(self) -> None:
        self._told: list[Any] = []

    def take(self) -> list[Any]:
        """Return what was told since the last call."""
        told, self._told = self._told, []
        return told

    def _tell(self, event: str, episode: Any, *more: Any) -> None:
        self._told.append([event, episode and [episode.episode_id, len(episode), episode.episode_return], *more])

    def on_environment_created(self, *_: Any, env_context: Any, **kwargs: Any) -> None:
        c = env_context
        self._tell("environment_created", None, c.vector_index, c.num_envs, c.worker_index, c.recreated, c.seed)

    def on_episode_created(self, *_: Any, episode: Any, env_index: int, **kwargs: Any) -> None:
        self._tell("created", episode, env_index)

    def on_episode_start(self, *_: Any, episode: Any, env_index: int, **kwargs: Any) -> None:
        self._tell("start", episode, env_index)

    def on_episode_step(self, *_: Any, episode: Any, env_index: int, **kwargs: Any) -> None:
        self._tell("step", episode, env_index)

    def on_episode_end(self, *_: Any, episode: Any, env_index: int, **kwargs: Any) -> None:
        self._tell("end", episode, env_index, episode.end)

    def on_episode_aborted(self, *_: Any, episode: Any, env_index: int, reason: str, **kwargs: Any) -> None:
        self._tell("aborted", episode, env_index, reason)

    def on_env_failed(self, *_: Any, episode: Any, env_index: int, exc: Exception, **kwargs: Any) -> None:
        self._tell("env_failed", episode, env_index, type(exc).__name__)

    def on_sample_end(self, *_: Any, samples: Any, **kwargs: Any) -> None:
        self._tell("sample_end", None, len(samples))

    def on_weights_applied(self, *_: Any, version: Any, **kwargs: Any) -> None:
        self._tell("weights_applied", None, version)


class Hosts:
    """Env hosts by their settings: each is started when it is first asked for, and serves one runner after another."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="golden-hosts-", dir="/tmp")  # a short path, for sockets

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)
        self._folder.cleanup()

    def socket_dir(self, settings: Settings, slot: int) -> str:
        """Return the folder of the socket at which a runner in `slot` has to listen for the host of these settings."""
        key = json.dumps([settings, slot], sort_keys=True)
        if key not in self._folders:
            self._folders[key] = folder = Path(self._folder.name) / f"{len(self._folders)}"
            folder.mkdir(mode=0o700)
            self._start(folder, slot, **settings)
        return str(self._folders[key])

    def _start(self, folder: Path, slot: int, env: str, num_envs: int, env_config: Settings | None = None) -> None:
        command = [sys.executable, "-m", "headrace.deploy", "env-host", "--env", env, "--num-envs", str(num_envs)]
        command += ["--connect", f"ipc://{folder}/envs-{slot}", "--set", "sampling.envs_per_process=2"]
        command += ["--set", "worker.connect_timeout_s=100000"]  # other cases may come between two that use this host
        if env_config is not None:
            command += ["--set", f"sampling.env_config={json.dumps(env_config)}"]
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        with folder.with_suffix(".log").open("wb") as log:
            environment = os.environ | {"PYTHONPATH": path}
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
