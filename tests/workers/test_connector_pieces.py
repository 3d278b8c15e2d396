"""Each connector by itself: the rows and spaces it gives, and the inputs it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.chunks.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Spaces, Tuple
from headrace.schemas.errors import ConfigError
from headrace.workers.connectors import (
    AgentOneHot,
    ClipActions,
    Connector,
    FlattenObservations,
    FrameStack,
    MeanStd,
    PreviousActionReward,
    Rows,
    TimeOneHot,
    UnsquashActions,
)

VECTOR = Box(shape=(2,), dtype="<f4")
MIXED = Dict(
    spaces={
        "arm": Tuple(spaces=(Box(shape=(2, 2), dtype="<f8"), Discrete(n=3, start=-1))),
        "grip": MultiDiscrete(nvec=(2, 3), start=(0, 5), shape=(2,)),
        "on": MultiBinary(shape=(2,)),
    }
)


def connect(piece: Connector, observation: Space = VECTOR, action: Space | None = None, width: int = 3) -> Spaces:
    return piece.connect(Spaces(observation=observation, action=action or Discrete(n=2)), width)


def rows(
    columns: Any, lanes: Any = (0, 1, 2), first: bool = False, actions: Any = None, rewards: Any = None, agents: Any = 0
) -> Rows:
    columns = columns if isinstance(columns, dict) else {"obs": np.asarray(columns, np.float32)}
    index = np.array(lanes, np.intp)
    rewards = np.zeros(len(index)) if rewards is None else np.asarray(rewards, np.float64)
    return Rows(index, columns, actions or {}, rewards, first, np.full(len(index), agents, np.intp))


def test_flatten_puts_all_leaves_side_by_side_with_choices_one_hot() -> None:
    piece = FlattenObservations()
    assert connect(piece, MIXED).observation == Box(shape=(14,), dtype="<f4")
    flat = piece.process(
        rows(
            {
                "obs/arm/0": np.arange(8.0).reshape(2, 2, 2),
                "obs/arm/1": np.array([-1, 1]),
                "obs/grip": np.array([[1, 5], [0, 7]]),
                "obs/on": np.array([[0, 1], [1, 1]], np.int8),
            },
            lanes=(0, 1),
        )
    )["obs"]
    assert flat.dtype == np.float32
    assert flat.tolist() == [
        [0, 1, 2, 3, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1],
        [4, 5, 6, 7, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1],
    ]


def test_frame_stack_keeps_its_rank_and_its_bounds() -> None:
    image = Box(shape=(4, 5, 1), dtype="|u1", low=0.0, high=255.0)
    assert connect(FrameStack(3), image).observation == Box(shape=(4, 5, 3), dtype="|u1", low=0.0, high=255.0)
    assert connect(FrameStack(2, axis=0), image).observation.model_dump()["shape"] == (8, 5, 1)
    uneven = Box(shape=(2,), dtype="<f4", low=(0.0, None), high=(1.0, 2.0))
    stacked = connect(FrameStack(2), uneven).observation
    assert stacked == Box(shape=(4,), dtype="<f4", low=(0.0, None, 0.0, None), high=(1.0, 2.0, 1.0, 2.0))


@pytest.mark.parametrize("space", [MIXED, Discrete(n=2), Box(shape=(), dtype="<f4")])
def test_frame_stack_refuses_spaces_that_it_cannot_stack(space: Space) -> None:
    with pytest.raises(ConfigError, match="put FlattenObservations before it"):
        connect(FrameStack(2), space)


@settings(max_examples=60)
@given(
    frames=st.integers(1, 4),
    axis=st.sampled_from([-1, 0, 1]),
    calls=st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 2), min_size=1)), min_size=1, max_size=12),
)
def test_frame_stack_equals_a_loop_over_each_lanes_own_frames(
    frames: int, axis: int, calls: list[tuple[bool, set[int]]]
) -> None:
    piece = FrameStack(frames, axis)
    connect(piece, Box(shape=(2, 3), dtype="<f4"))
    kept: dict[int, list[Any]] = {}
    stamp = 0.0
    for first, chosen in [(True, {0, 1, 2}), *calls]:
        lanes = sorted(chosen)
        frame = np.stack([np.full((2, 3), stamp + lane, np.float32) for lane in lanes])
        stamp += 10
        if first:
            piece.reset(np.array(lanes))
        stacked = piece.process(rows(frame, lanes, first))["obs"]
        for i, lane in enumerate(lanes):
            kept[lane] = [frame[i]] * frames if first else [*kept[lane][1:], frame[i]]
            np.testing.assert_array_equal(stacked[i], np.concatenate(kept[lane], axis=axis))


def test_previous_action_and_reward_stand_beside_the_observation() -> None:
    piece = PreviousActionReward()
    action = Tuple(spaces=(Discrete(n=2), Box(shape=(1,), dtype="<f4")))
    observation = connect(piece, VECTOR, action).observation
    assert isinstance(observation, Dict)
    assert list(observation.spaces) == ["obs", "prev_action", "prev_reward"]
    born = piece.process(rows(np.ones((3, 2)), first=True))
    assert not born["obs/prev_action"].any()
    assert not born["obs/prev_reward"].any()
    actions = {"actions/0": np.array([0, 1]), "actions/1": np.array([[0.5], [-2.0]], np.float32)}
    later = piece.process(rows(np.ones((2, 2)), (0, 2), actions=actions, rewards=[3.0, -1.0]))
    assert later["obs/prev_action"].tolist() == [[1, 0, 0.5], [0, 1, -2.0]]
    assert later["obs/prev_reward"].tolist() == [[3], [-1]]
    assert later["obs/obs"].tolist() == [[1, 1], [1, 1]]


def test_time_is_one_hot_of_the_lanes_own_steps() -> None:
    piece = TimeOneHot(3)
    connect(piece)
    frame = np.zeros((2, 2))
    seen = []
    for first in (True, False, False, False):
        seen.append(piece.process(rows(frame, (0, 2), first))["obs/time"].argmax(1).tolist())
    assert seen == [[0, 0], [1, 1], [2, 2], [2, 2]]
    piece.reset(np.array([2]))
    assert piece.process(rows(frame[:1], (2,), first=True))["obs/time"].argmax() == 0
    assert piece.process(rows(frame[:1], (0,)))["obs/time"].argmax() == 2


def test_connectors_add_keys_to_a_dict_and_refuse_a_taken_name() -> None:
    spaces = connect(TimeOneHot(2), MIXED)
    assert list(spaces.observation.model_dump()["spaces"]) == ["arm", "grip", "on", "time"]
    with pytest.raises(ConfigError, match=r"already has \['time'\]"):
        TimeOneHot(2).connect(spaces, 1)


@pytest.mark.parametrize("build", [lambda: FrameStack(0), lambda: TimeOneHot(0), lambda: MeanStd(clip=0.0)])
def test_settings_that_make_no_sense_are_refused(build: Any) -> None:
    with pytest.raises(ConfigError, match="give"):
        build()


# -- running statistics ------------------------------------------------------------------------------------------------


def run(piece: MeanStd, lane_rows: list[np.ndarray[Any, Any]]) -> None:
    """One row of each lane that still has one, poll after poll."""
    for t in range(max(map(len, lane_rows))):
        lanes = [i for i, own in enumerate(lane_rows) if t < len(own)]
        piece.process(rows(np.stack([lane_rows[i][t] for i in lanes]).astype(np.float64), lanes, first=t == 0))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    runners=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    offset=st.sampled_from([0.0, 1e3, -1e4]),
    base_rows=st.sampled_from([0, 1, 50]),
)
def test_merged_updates_equal_the_moments_of_all_rows_together(
    seed: int, runners: list[list[int]], offset: float, base_rows: int
) -> None:
    rng = np.random.default_rng(seed)

    def draw(n: int) -> Any:
        return rng.normal(offset, 3.0, (n, 2)).astype(np.float32)

    base, everything = draw(base_rows), [draw(0)]
    known: dict[str, Any] | None = None
    if base_rows:
        known = {"obs/count": np.full(1, float(base_rows)), "obs/mean": base.mean(0, dtype=np.float64)}
        known["obs/m2"] = ((base - known["obs/mean"]) ** 2).sum(0)
        everything.append(base)
    updates, pieces = [], []
    for lanes in runners:
        piece = MeanStd()
        connect(piece, VECTOR, width=len(lanes))
        if known is not None:
            piece.set_state(known)
        lived = [draw(n) for n in lanes]
        if any(lanes):
            run(piece, lived)
        updates.append(piece.take_update())
        pieces.append(piece)
        everything += lived
    merged = MeanStd().merge(known or {}, updates)
    whole = np.concatenate(everything).astype(np.float64)
    assert merged.get("obs/count", np.zeros(1)).tolist() == [len(whole)]
    if len(whole):
        np.testing.assert_allclose(merged["obs/mean"], whole.mean(0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(merged["obs/m2"] / len(whole), whole.var(0), rtol=1e-9, atol=1e-9)
    for piece in pieces if merged else []:
        piece.set_state(merged)
        assert piece.take_update() == {}
        for name, array in piece.get_state().items():
            np.testing.assert_array_equal(array, merged[name])


def test_a_lane_is_scaled_by_the_shared_moments_and_its_own_rows() -> None:
    piece = MeanStd(clip=5.0)
    spaces = connect(piece, Box(shape=(1,), dtype="<f8"), width=2)
    assert spaces.observation == Box(shape=(1,), dtype="<f4", low=-5.0, high=5.0)
    own = [1.0, 3.0, 8.0]
    for t, value in enumerate(own):
        scaled = piece.process(rows({"obs": np.array([[value], [100.0 * t]])}, (0, 1)))["obs"]
        lived = np.array(own[: t + 1])
        deviation = lived.std(ddof=1) if t else 1.0
        assert scaled[0, 0] == pytest.approx((value - lived.mean()) / deviation, rel=1e-6)
    piece.take_update()
    piece.set_state({"obs/count": np.array([100.0]), "obs/mean": np.array([2.0]), "obs/m2": np.array([99.0 * 4])})
    assert piece.process(rows({"obs": np.array([[2.0]])}, (0,)))["obs"][0, 0] == pytest.approx(0.0)
    assert piece.process(rows({"obs": np.array([[1e9]])}, (1,)))["obs"][0, 0] == pytest.approx(5.0)


def test_mean_std_without_update_learns_nothing_and_passes_discrete_leaves() -> None:
    piece = MeanStd(update=False)
    mixed = Dict(spaces={"x": VECTOR, "kind": Discrete(n=4)})
    assert connect(piece, mixed).observation.model_dump()["spaces"]["kind"]["n"] == 4
    columns = {"obs/x": np.full((3, 2), 7.0, np.float32), "obs/kind": np.array([1, 2, 3])}
    scaled = piece.process(rows(columns))
    assert scaled["obs/kind"].tolist() == [1, 2, 3]
    assert scaled["obs/x"].tolist() == [[7, 7]] * 3
    assert not any(part.any() for part in piece.get_state().values())


# -- actions -----------------------------------------------------------------------------------------------------------


def test_actions_are_mapped_into_bounds_and_clipped() -> None:
    bounded = Box(shape=(2,), dtype="<f4", low=(0.0, -10.0), high=(4.0, 10.0))
    space = Tuple(spaces=(bounded, Discrete(n=3), Box(shape=(1,), dtype="<f4", low=0.0, high=None)))
    columns = {
        "actions/0": np.array([[0.5, -3.0]], np.float32),
        "actions/1": np.array([2]),
        "actions/2": np.array([[-7.0]], np.float32),
    }
    unsquash, clip = UnsquashActions(), ClipActions()
    squashed = Box(shape=(2,), dtype="<f4", low=-1.0, high=1.0)
    assert connect(unsquash, action=space).action == Tuple(spaces=(squashed, *space.spaces[1:]))
    connect(clip, action=space)
    mapped = unsquash.process(rows(columns, (0,), actions=columns))
    assert {name: column.tolist() for name, column in mapped.items()} == {
        "actions/0": [[3, -10]],
        "actions/1": [2],
        "actions/2": [[0]],
    }
    clipped = clip.process(rows(columns, (0,), actions=columns))
    assert clipped["actions/0"].tolist() == [[0.5, -3.0]]
    assert clipped["actions/2"].tolist() == [[0]]
    twice = unsquash.process(rows(mapped, (0,), actions=columns))
    assert twice["actions/0"].tolist() == [[3, -10]], "no action is mapped twice"


def test_agent_one_hot_encodes_the_agents_place() -> None:
    piece = AgentOneHot(3)
    assert connect(piece).observation == Dict(
        spaces={"obs": VECTOR, "agent": Box(shape=(3,), dtype="<f4", low=0.0, high=1.0)}
    )
    told = piece.process(rows(np.ones((3, 2)), agents=(2, 0, 1)))
    np.testing.assert_array_equal(told["obs/agent"], np.eye(3, dtype=np.float32)[[2, 0, 1]])
    np.testing.assert_array_equal(told["obs/obs"], np.ones((3, 2)))
    assert told["obs/agent"].dtype == np.float32


@pytest.mark.parametrize("odd", [np.inf, -np.inf, 1e300])
def test_an_infinite_observation_is_scaled_and_spoils_no_sum(odd: float) -> None:
    piece, sane = MeanStd(), MeanStd()
    for one in (piece, sane):
        connect(one, Box(shape=(2,), dtype="<f8"), width=2)
    for seen in ([[1.0, 2.0], [3.0, 4.0]], [[odd, 3.0], [5.0, 6.0]], [[7.0, 8.0], [9.0, 0.0]]):
        scaled = piece.process(rows({"obs": np.array(seen)}, (0, 1)))["obs"]
        lanes = [lane for lane in (0, 1) if odd not in seen[lane]]
        sane.process(rows({"obs": np.array(seen)[lanes]}, lanes))
        assert np.isfinite(scaled).all()
        assert abs(scaled[0, 0]) == 10 or odd not in seen[0]
    ours, theirs = piece.take_update(), sane.take_update()
    assert ours["obs/count"] == [5]
    assert {name: array.tolist() for name, array in ours.items()} == {n: a.tolist() for n, a in theirs.items()}


@pytest.mark.parametrize(
    "changed",
    [
        {"obs/mean": np.array([np.nan, 0.0])},
        {"obs/m2": np.array([-1.0, 0.0])},
        {"obs/count": np.array([np.inf])},
        {"obs/count": np.array(3.0)},
        {"obs/mean": np.array([1e300, 0.0])},
        {"obs/mean": np.zeros(3), "obs/m2": np.zeros(3)},
        {"obs/m2": np.zeros((2, 2))},
    ],
)
def test_merge_refuses_updates_with_impossible_moments(changed: dict[str, Any]) -> None:
    sound = {"obs/count": np.array([3.0]), "obs/mean": np.ones(2), "obs/m2": np.ones(2)}
    with pytest.raises(ValueError, match="obs"):
        MeanStd().merge(sound, [{**sound, **changed}])


@pytest.mark.parametrize(
    "build", [lambda: FrameStack(3), lambda: TimeOneHot(4), MeanStd, lambda: FrameStack(2, axis=0)]
)
def test_lanes_added_later_behave_as_lanes_present_from_the_start(build: Any) -> None:
    wide, growing = build(), build()
    connect(wide, width=5)
    connect(growing, width=0)
    random = np.random.default_rng(0)
    there = 0
    for step, width in enumerate((2, 2, 3, 3, 5, 5, 5)):
        if width > there:
            growing.widen(width)
            first = random.normal(size=(width - there, 2))
            for piece in (wide, growing):
                piece.reset(np.arange(there, width))
            _compare_pieces(wide, growing, rows(first, range(there, width), first=True))
            there = width
        lanes = sorted(random.choice(width, 1 + step % width, replace=False).tolist())
        _compare_pieces(wide, growing, rows(random.normal(size=(len(lanes), 2)), lanes))
    assert wide.get_state().keys() == growing.get_state().keys()
    for name, array in wide.get_state().items():
        np.testing.assert_allclose(array, growing.get_state()[name], rtol=1e-12)


def _compare_pieces(one: Connector, other: Connector, given_rows: Rows) -> None:
    ours, theirs = one.process(given_rows), other.process(given_rows)
    assert ours.keys() == theirs.keys()
    for name, column in ours.items():
        np.testing.assert_array_equal(column, theirs[name])


def test_a_lane_added_later_gets_the_set_state_and_no_rows_of_other_lanes() -> None:
    """Otherwise the failure of one env would change the observations of a new agent in another env."""
    piece, untouched = MeanStd(), MeanStd()
    for each in (piece, untouched):
        connect(each, width=1)
        each.set_state({"obs/count": np.array([4.0]), "obs/mean": np.array([1.0, 2.0]), "obs/m2": np.array([3.0, 6.0])})
    piece.process(rows([[9.0, 9.0]], lanes=(0,)))
    piece.take_update()
    for each in (piece, untouched):
        each.widen(2)
    _compare_pieces(piece, untouched, rows([[0.5, 0.5]], lanes=(1,), first=True))
