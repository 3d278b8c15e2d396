"""Where an observation says which actions are legal: beside the rest, as "action_mask", a flag for each action."""

from __future__ import annotations

from headrace.schemas.spaces import Box, Dict, Discrete, MultiBinary, Spaces

MASK = "action_mask"


def has_action_mask(spaces: Spaces) -> bool:
    """Whether the observation is a Dict with a mask of the actions, and these a Discrete."""
    if not isinstance(spaces.observation, Dict) or not isinstance(spaces.action, Discrete):
        return False
    leaf = spaces.observation.spaces.get(MASK)
    return isinstance(leaf, Box | MultiBinary) and leaf.shape == (spaces.action.n,)
