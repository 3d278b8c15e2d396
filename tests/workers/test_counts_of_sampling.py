"""Callbacks and metrics of sampling, in exact numbers: {one agent, two} x {1, 3, 8 envs} x both sizes."""

from __future__ import annotations

from support.runners.callbacks import Recording, count_events
from support.runners.kinds import KINDS, LENGTH, MODES, WIDTHS, Kind, resets_of, whole_polls

# -- callbacks --------------------------------------------------------------------------------------------------------


@KINDS
@WIDTHS
@MODES
def test_callbacks_come_once_for_each_episode_and_step(kind: Kind, num_envs: int, mode: str) -> None:
    """For m episodes: created = started = ended = m. No episode starts after the m-th has ended."""
    seen = Recording()
    with kind.runner(num_envs, callbacks=[seen]) as sampler:
        assert count_events(seen.told) == {"on_environment_created": num_envs}
        seen.told.clear()
        if mode == "num_episodes":
            sampler.sample(num_episodes=5)
            episodes = whole_polls(5, num_envs)
            expected = {"created": episodes, "start": episodes, "step": episodes * LENGTH, "end": episodes}
        else:
            sampler.sample(num_timesteps=(2 * LENGTH + 20) * num_envs)
            started, ended = 3 * num_envs, 2 * num_envs
            expected = {"created": started, "start": started, "step": 120 * num_envs, "end": ended}
        counts = count_events(seen.told)
        assert counts.pop("on_sample_end") == 1
        assert counts == {f"on_episode_{event}": count for event, count in expected.items()}
        assert resets_of(sampler) == expected["start"]


@KINDS
@WIDTHS
@MODES
def test_callbacks_come_in_the_order_of_the_episode(kind: Kind, num_envs: int, mode: str) -> None:
    """Each env's events come in the order of its episodes. on_sample_end comes last, with the returned samples."""
    seen = Recording()
    with kind.runner(num_envs, length=2, callbacks=[seen]) as sampler:
        seen.told.clear()
        samples = sampler.sample(**{mode: 4 * num_envs if mode == "num_timesteps" else 2 * num_envs})
    once = [f"on_episode_{event}" for event in ("created", "start", "step", "step", "end")]
    # A call for time steps has the next episode under way when it returns.
    expected = once * 2 + (once[:2] if mode == "num_timesteps" else [])
    last, arguments = seen.told.pop()
    assert (last, arguments["samples"]) == ("on_sample_end", samples)
    for index in range(num_envs):
        assert [event for event, a in seen.told if a["env_index"] == index] == expected


# -- metrics ----------------------------------------------------------------------------------------------------------


@KINDS
@WIDTHS
@MODES
def test_metrics_count_whole_episodes(kind: Kind, num_envs: int, mode: str) -> None:
    """50 steps, 50 steps, 50 steps: each call is one episode of each env, and so are its figures."""
    with kind.runner(num_envs) as sampler:
        for call in range(1, 4):
            size = num_envs if mode == "num_episodes" else LENGTH * num_envs
            chunks = sampler.sample(**{mode: size})
            agents = sorted({c.agent_id for c in chunks})
            report = sampler.get_metrics()
            assert report["num_env_steps_sampled"] == LENGTH * num_envs
            assert report["num_env_steps_sampled_lifetime"] == LENGTH * call * num_envs
            assert report["num_episodes"] == num_envs
            assert report["num_agent_steps_sampled"] == dict.fromkeys(agents, LENGTH * num_envs)
            assert sum(report["num_module_steps_sampled"].values()) == LENGTH * num_envs * kind.agents
            assert {report[f"episode_len_{figure}"] for figure in ("mean", "min", "max")} == {LENGTH}
            whole = sum(t + agent for t in range(1, LENGTH + 1) for agent in range(kind.agents))
            assert {report[f"episode_return_{figure}"] for figure in ("mean", "min", "max")} == {whole}
            assert report["agent_steps"] == dict.fromkeys(agents, LENGTH)
            assert sum(report["agent_episode_returns_mean"].values()) == whole
            assert sum(report["module_episode_returns_mean"].values()) == whole


@KINDS
@WIDTHS
def test_metrics_count_an_episode_with_the_fragment_that_ends_it(kind: Kind, num_envs: int) -> None:
    """An episode of 50 steps in fragments of 20 is counted once, with its third fragment."""
    finished = []
    with kind.runner(num_envs) as sampler:
        for _ in range(5):
            sampler.sample(num_timesteps=20 * num_envs)
            report = sampler.get_metrics()
            assert report["num_env_steps_sampled"] == 20 * num_envs
            finished.append(report["num_episodes"])
            assert report.get("episode_len_mean", LENGTH) == LENGTH
        assert report["num_episodes_lifetime"] == 2 * num_envs
    assert finished == [0, 0, num_envs, 0, num_envs]
