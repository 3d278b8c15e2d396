"""`headrace.fleet`: a fleet that a program starts, reads and stops."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import gymnasium as gym
import pytest

import headrace
from headrace.deploy.annexes.programs import fleet
from headrace.deploy.process.fleet_errors import FleetError
from headrace.schemas.errors import ConfigError, ExitCode
from support.waiting import wait_until

PROGRAM = """
    import gymnasium as gym
    import torch

    import headrace

    class Cart(gym.Wrapper):
        def __init__(self, context=None):
            super().__init__(gym.make("CartPole-v1"))

    def small(spaces):
        return headrace.actor_critic(spaces, hidden=[8])
"""
TRAINING = """
    if __name__ == "__main__":
        with headrace.fleet(Cart, workers=2, num_envs=2, seed=0, module=small) as run:
            stream, weights = run.stream(), run.weights()
            module = small(stream.spaces())
            weights.publish(module.state_dict())
            for number, batch in zip(range(10), stream):
                weights.publish(module.state_dict())
        print(run.summary["balanced"], run.summary["env_steps"] > 0, run.summary["weights_seq"], run.path)
"""


def run_program(folder: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    """Run a program from another folder than its own, as users do."""
    (folder / "programs").mkdir()
    file = folder / "programs" / "train_cart.py"
    file.write_text("".join(textwrap.dedent(part) for part in parts))
    return subprocess.run([sys.executable, file], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_program_of_one_file_trains_its_own_env_and_module(tmp_path: Path) -> None:
    done = run_program(tmp_path, PROGRAM, TRAINING)
    balanced, stepped, seq, path = done.stdout.split()
    assert (balanced, stepped) == ("True", "True"), done.stderr
    assert int(seq) >= 10
    assert Path(path).parent == tmp_path / "runs"
    assert "Traceback" not in done.stderr


def test_a_program_that_starts_its_fleet_while_workers_import_it_is_told_what_to_do(tmp_path: Path) -> None:
    done = run_program(tmp_path, PROGRAM, "headrace.fleet(Cart)\n")
    assert 'below `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
    assert done.returncode == 1


def test_a_stream_ends_at_once_with_its_fleet(tmp_path: Path) -> None:
    with fleet("CartPole", env_config={"sutton_barto_reward": True}, run_dir=tmp_path / "run", until_steps=500) as run:
        stream, weights = run.stream(), run.weights()
        weights.publish(policy(stream.spaces()))
        first = next(stream)
        steps = first.steps
        told = rf"<EpisodeStream from \S+: {steps:,} steps in 1 batches, lag \d\.\d, \d workers>"
        assert re.fullmatch(told, repr(stream))
        assert re.fullmatch(rf"<RunningFleet in {tmp_path / 'run'}: running, page \S.*; {told}>", repr(run))
        assert re.fullmatch(r"<WeightPublisher to \S+: version \(1, 1\), the broker has \(1, 1\)>", repr(weights))
        chunks = [chunk for batch in [first, *stream] for chunk in batch]
        steps = sum(map(len, chunks))
        assert {float(reward) for chunk in chunks for reward in chunk.rewards} == {0.0, -1.0}
        with pytest.raises(StopIteration):
            next(stream)
        assert not run.is_running
        assert repr(run).startswith(f"<RunningFleet in {tmp_path / 'run'}: ended; <EpisodeStream from ")
        end = rf"the fleet in {run.path} reached its goal at \S+ \S+ after [\d,]+ env steps"
        end = rf"{end}; go on with headrace\.fleet\(\.\.\., run_dir='{run.path}'\)"
        assert re.fullmatch(end, stream.ended)
        with pytest.raises(FleetError, match=end):
            run.stream()
    assert steps >= 500
    assert run.summary["goal_reached"] is True
    assert repr(run) == f"<RunningFleet in {tmp_path / 'run'}: ended>"
    for closed in (stream, weights):
        assert "\n" not in repr(closed)


def policy(spaces: object) -> dict[str, object]:
    from headrace import actor_critic

    return actor_critic(spaces).state_dict()


def test_a_fleet_that_does_not_start_raises_what_up_says(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"environment 'NoSuchEnv-v1' cannot be found") as told:
        fleet("NoSuchEnv-v1", run_dir=tmp_path / "run")
    assert told.value.exit_code == ExitCode.ENV
    with pytest.raises(FleetError, match=r"sampling.num_env: unknown key; did you mean sampling.num_envs\?$") as told:
        fleet("CartPole-v1", run_dir=tmp_path / "run", settings={"sampling.num_env": 8})
    assert "flag" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("num_env", "did you mean num_envs?"),
        ("num_env_runners", "did you mean workers?"),
        ("fragment_length", 'did you mean settings={"sampling.rollout_fragment_length": ...}?'),
        ("colour", "settings={...} takes all settings by their keys, which `headrace up --print-config` lists"),
    ],
)
def test_an_unknown_argument_is_answered_with_the_nearest(name: str, advice: str) -> None:
    with pytest.raises(ConfigError) as told:
        fleet("CartPole-v1", **{name: 1})  # type: ignore[arg-type]
    assert str(told.value) == f"fleet() has no argument {name!r}; {advice}"


def test_an_env_that_only_the_main_program_defines_is_told_where_to_stand(tmp_path: Path) -> None:
    text = "import headrace\nif __name__ == '__main__':\n    def make(context): ...\n    headrace.fleet(make)\n"
    done = run_program(tmp_path, text)
    assert "define it at the top of its file, not below `if __name__" in done.stderr.splitlines()[-1]


def test_a_fleet_whose_supervisor_is_killed_ends_the_stream_and_says_why(tmp_path: Path) -> None:
    def train() -> None:
        with fleet("CartPole-v1", run_dir=tmp_path / "run") as run:
            stream, weights = run.stream(), run.weights()
            weights.publish(policy(stream.spaces()))
            for number, _ in enumerate(stream):
                if number == 0:
                    os.kill(run._up.pid, signal.SIGKILL)

    with pytest.raises(FleetError, match=r"was killed by SIGKILL"):
        train()


def test_a_killed_program_takes_its_fleet_along(tmp_path: Path) -> None:
    script = "import headrace; run = headrace.fleet('CartPole-v1', run_dir='run'); print(run._up.pid); input()"
    command = [sys.executable, "-u", "-c", script]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        program.kill()
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the supervisor")


def test_the_first_failure_of_an_env_is_told_and_the_page_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    goal = {"fleet.until_steps": 20_000, "dashboard.enabled": True}
    settings = {"module.build": headrace.actor_critic, **goal}
    with fleet("support.envs.fleet:three_of_eight", num_envs=8, run_dir=tmp_path / "run", settings=settings) as run:
        stream, weights = run.stream(), run.weights()
        weights.publish(policy(stream.spaces()))
        wait_until(lambda: run.dashboard.startswith("http://127.0.0.1:"), "the address of the page")
        assert sum(batch.steps for batch in stream) > 0
    [line] = [line for line in capfd.readouterr().err.splitlines() if "an env failed: " in line]
    assert "RuntimeError: the simulator diverged at " in line
    assert line.endswith(f"; `headrace why {tmp_path / 'run'}` counts such failures")


@pytest.mark.parametrize("env", [lambda context: None, gym.Env()])
def test_an_env_that_workers_cannot_import_is_refused(env: object) -> None:
    with pytest.raises(ConfigError, match="only a function or class at the top of a module"):
        fleet(env)


def test_an_env_of_a_notebook_is_refused_with_the_way_out(tmp_path: Path) -> None:
    script = "import headrace\nclass Cart: ...\nheadrace.fleet(Cart)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "in a notebook, `%%writefile my_code.py` saves a cell as a module" in done.stderr


def test_an_end_that_headrace_has_no_code_for_is_told_by_its_number(tmp_path: Path) -> None:
    run = fleet("CartPole-v1", run_dir=tmp_path / "run")
    run.close()
    run._up.returncode = 143
    with pytest.raises(FleetError, match=r"of the fleet in .*/run ended with exit code 143$") as told:
        run.close()
    assert told.value.exit_code == ExitCode.FAILURE


def test_a_second_fleet_names_the_first_and_a_fleet_without_a_learner_waits_for_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with headrace.fleet("CartPole-v1", workers=1, run_dir=one) as first:
        with headrace.fleet("CartPole-v1", workers=1, run_dir=other):
            assert f"the fleet in {one}, which this program has started, still runs; its close() ends it" in caplog.text
        caplog.clear()
    assert "for a learner to say" not in capfd.readouterr().err
    assert first.summary["balanced"]
