"""`headrace slurm` without a cluster: the lines of sbatch, what is refused, and the scripts as text."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.deploy.annexes.slurm.lifecycle import dry_run, prepare
from headrace.deploy.annexes.slurm.submission import SCRIPTS, for_cluster
from headrace.deploy.run.options import Asked
from headrace.schemas.errors import ConfigError, ExitCode, HeadraceError
from headrace.schemas.settings.config import FleetConfig
from headrace.schemas.settings.config_loading import load_config

SHELLCHECK = shutil.which("shellcheck")
KNOWN_TO_BOTH = {
    *("parsable", "export", "job-name", "output", "array", "dependency", "nodes", "ntasks", "cpus-per-task"),
    *("signal", "requeue", "open-mode"),
}
"""Options of sbatch that the manuals of Slurm 22.05 and 25.05 both have."""


def settings(**values: object) -> FleetConfig:
    return Asked(flags={key.replace("__", "."): value for key, value in values.items()}).settings


def test_a_dry_run_shows_the_lines_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(
        '[slurm]\nworker_tasks = 3\nworkers_per_task = 4\noptions = ["--partition=a", "--time=60"]\n'
        'head_options = ["--time=5"]\n'
    )
    command = [sys.executable, "-m", "headrace.deploy", "slurm", "up", "fleet.toml", "--run-dir", "run", "--dry-run"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["fleet.toml"]
    head, workers = (line.split() for line in shown)
    run = str(tmp_path / "run")
    assert [Path(word).name for word in head[-3:]] == ["head.sbatch", "run", "headrace"]
    assert [Path(word).name for word in workers[-4:]] == ["workers.sbatch", "run", "headrace", "4"]
    assert {"--array=0-2", "--dependency=after:HEAD_JOB_ID", f"--output={run}/slurm/%x-%A_%a.log"} <= set(workers)
    assert [word for word in workers if word.startswith(("--time", "--cpus"))] == [*("--cpus-per-task=4", "--time=60")]
    assert [word for word in head if word.startswith(("--time", "--array", "--cpus"))] == ["--time=60", "--time=5"]


def test_jobs_use_only_options_that_both_versions_of_slurm_have(tmp_path: Path) -> None:
    lines = dry_run(settings(slurm__env_host_tasks=1, sampling__env_placement="remote"))
    used = {word for line in lines for word in line if word.startswith("--")}
    used |= {
        line.split()[1]
        for path in SCRIPTS.glob("*.sbatch")
        for line in path.read_text().splitlines()
        if line.startswith("#SBATCH")
    }
    assert {word[2:].partition("=")[0] for word in used} == KNOWN_TO_BOTH


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("slurm.options", ["--array=0-3"], "--array is set by `headrace slurm` itself; leave it out"),
        ("slurm.head_options", ["-p cpu"], "'-p cpu' is no option of sbatch"),
        ("slurm.head_options", ["--time=1\n#"], "is no option of sbatch"),
        ("slurm.worker_tasks", 10_001, "less than or equal to 10000"),
        ("slurm.env_host_tasks", 2, "env hosts are for 'remote', and it is 'inline'"),
        ("worker.window_batches", 2, "from one worker (with fleet.workers = 0 it may be the only one)"),
    ],
)
def test_settings_that_cannot_work_on_a_cluster_are_refused(key: str, value: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        for_cluster(Asked(flags={key: value}).settings, tmp_path)


def test_jobs_get_keys_an_address_for_all_nodes_and_the_settings_of_the_moment(tmp_path: Path) -> None:
    toml, run = tmp_path / "fleet.toml", tmp_path / "run"
    toml.write_text(f'[fleet]\nrun_dir = "{run}"\nworkers = 7\n[learner]\ngamma = 0.5\n')
    prepare(Asked(toml).settings)
    toml.write_text("[learner]\ngamma = 0.9\n")
    frozen, _ = load_config(run / "slurm" / "settings.json", {})
    assert (frozen.learner.gamma, frozen.fleet.workers, frozen.broker.host) == (0.5, 0, "0.0.0.0")
    assert frozen.keys.dir == str(run / "keys")
    assert (frozen.worker.ends_with_fleet, frozen.worker.connect_timeout_s) == (True, 600.0)
    assert (run / "keys" / "broker.secret").stat().st_mode & 0o077 == 0
    assert (run / "slurm" / "settings.json").stat().st_mode & 0o077 == 0


def test_settings_that_the_user_gives_are_not_replaced(tmp_path: Path) -> None:
    named = settings(broker__host="10.0.0.7", keys__dir=str(tmp_path / "keys"), worker__connect_timeout_s=60.0)
    ready = for_cluster(named, tmp_path / "run")
    assert (ready.broker.host, ready.keys.dir) == ("10.0.0.7", str(tmp_path / "keys"))
    assert ready.worker.connect_timeout_s == 60.0
    open_to_all = for_cluster(settings(broker__host="127.0.0.1", broker__allow_insecure=True), tmp_path / "run")
    assert (open_to_all.broker.host, open_to_all.keys.dir) == ("0.0.0.0", "")


def test_the_head_job_runs_the_workers_of_env_host_jobs(tmp_path: Path) -> None:
    asked = settings(fleet__workers=2, slurm__env_host_tasks=3, sampling__env_placement="remote")
    ready = for_cluster(asked, tmp_path / "run")
    assert (ready.fleet.workers, ready.env_hosts_host) == (2, "0.0.0.0")
    *_, env_hosts = dry_run(asked)
    assert Path(env_hosts[-3]).name == "env_hosts.sbatch"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("up", "fleet.toml"), ExitCode.UNREACHABLE, "sbatch is not on PATH; run this where Slurm's commands are"),
        (("status", "--run-dir", "none"), ExitCode.RUN_DIR, "name a run that `headrace slurm up` has started"),
        (("scale", "2", "--run-dir", "none"), ExitCode.CONFIG, "settings.json"),
        (("down", "--run-dir", "none"), ExitCode.RUN_DIR, "jobs.json cannot be read"),
    ],
)
def test_an_impossible_command_gives_an_error_of_one_sentence(
    words: tuple[str, ...], code: ExitCode, said: str, tmp_path: Path
) -> None:
    (tmp_path / "fleet.toml").touch()
    command = [sys.executable, "-m", "headrace.deploy", "slurm", *words]
    environment = {**os.environ, "PATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr.rpartition("error: ")[2]
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not on PATH")
def test_shellcheck_accepts_the_scripts() -> None:
    assert SHELLCHECK is not None
    scripts = sorted(str(path) for path in SCRIPTS.iterdir() if path.suffix in (".sbatch", ".sh"))
    assert len(scripts) == 4
    checked = subprocess.run([SHELLCHECK, *scripts], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.thorough
def test_a_run_of_other_settings_is_refused_before_anything_is_submitted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "headrace.deploy",
        "up",
        "--run-dir",
        str(run),
        "--workers",
        "1",
        "--num-envs",
        "2",
    ]
    subprocess.run([*command, "--until-steps", "200"], check=True, capture_output=True)
    with pytest.raises(HeadraceError, match=r"sampling\.env: .*name a new run directory with --run-dir"):
        prepare(settings(fleet__run_dir=str(run), sampling__env="Acrobot-v1"))
