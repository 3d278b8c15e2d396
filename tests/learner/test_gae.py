"""Advantages of many chunks at once equal those of a plain recursion, chunk by chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.learner_stub.gae import advantages

Chunk = tuple[NDArray[np.float64], NDArray[np.float64], float]


def _recursive(rewards: list[float], values: list[float], bootstrap: float, gamma: float, lam: float) -> list[float]:
    """A(t) = delta(t) + gamma * lambda * A(t + 1), as in the paper."""
    if not rewards:
        return []
    rest = _recursive(rewards[1:], values[1:], bootstrap, gamma, lam)
    next_value = values[1] if len(values) > 1 else bootstrap
    delta = rewards[0] + gamma * next_value - values[0]
    return [delta + gamma * lam * (rest[0] if rest else 0.0), *rest]


@st.composite
def _chunks(draw: st.DrawFn) -> list[Chunk]:
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return [(random.normal(size=n), random.normal(size=n), float(random.normal())) for n in lengths]


def _together(chunks: list[Chunk], gamma: float, lam: float) -> NDArray[np.float64]:
    return advantages(
        np.concatenate([rewards for rewards, _, _ in chunks]),
        np.concatenate([values for _, values, _ in chunks]),
        np.array([bootstrap for _, _, bootstrap in chunks]),
        np.cumsum([0, *(len(rewards) for rewards, _, _ in chunks)]),
        gamma=gamma,
        gae_lambda=lam,
    )


@given(_chunks(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_chunks_of_any_lengths_together_equal_a_recursion_over_each(
    chunks: list[Chunk], gamma: float, lam: float
) -> None:
    expected = [a for r, v, b in chunks for a in _recursive(r.tolist(), v.tolist(), b, gamma, lam)]
    np.testing.assert_allclose(_together(chunks, gamma, lam), expected, rtol=1e-10, atol=1e-10)


@given(_chunks(), st.floats(0.0, 1.0))
def test_lambda_one_gives_discounted_returns_less_values(chunks: list[Chunk], gamma: float) -> None:
    expected = []
    for rewards, values, bootstrap in chunks:
        returns = bootstrap
        backwards = []
        for reward in rewards[::-1]:
            returns = reward + gamma * returns
            backwards.append(returns)
        expected.append(np.array(backwards[::-1]) - values)
    np.testing.assert_allclose(_together(chunks, gamma, 1.0), np.concatenate(expected), rtol=1e-9, atol=1e-9)


@given(_chunks(), st.floats(0.0, 1.0))
def test_lambda_zero_gives_one_step_errors(chunks: list[Chunk], gamma: float) -> None:
    expected = [r + gamma * np.append(v[1:], b) - v for r, v, b in chunks]
    np.testing.assert_allclose(_together(chunks, gamma, 0.0), np.concatenate(expected), rtol=1e-12, atol=1e-12)


@given(_chunks())
def test_a_chunk_does_not_depend_on_its_neighbours(chunks: list[Chunk]) -> None:
    together = _together(chunks, 0.99, 0.95)
    alone = np.concatenate([_together([chunk], 0.99, 0.95) for chunk in chunks])
    np.testing.assert_array_equal(together, alone)


def test_exact_values_leave_no_advantage() -> None:
    values = 0.9 ** np.arange(5)[::-1]
    rewards = np.array([0.0, 0.0, 0.0, 0.0, 1.0])
    result = advantages(rewards, values, np.zeros(1), np.array([0, 5]), gamma=0.9, gae_lambda=0.95)
    assert result == pytest.approx(np.zeros(5))


def test_no_chunks_give_no_advantages() -> None:
    none = np.zeros(0)
    assert advantages(none, none, none, np.zeros(1, np.int64), gamma=0.9, gae_lambda=0.9).shape == (0,)
