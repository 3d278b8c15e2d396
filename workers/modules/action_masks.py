"""Action masks in observations: a Dict leaf "action_mask" with a flag for each action, nonzero where it is legal."""

from __future__ import annotations

from headrace.schemas.chunks.spaces import Box, Dict, Discrete, MultiBinary, Spaces

MASK = "action_mask"


def has_action_mask(spaces: Spaces) -> bool:
    """Return whether the observation is a Dict with a mask that fits a Discrete action space."""
    if not isinstance(spaces.observation, Dict) or not isinstance(spaces.action, Discrete):
        return False
    leaf = spaces.observation.spaces.get(MASK)
    return isinstance(leaf, Box | MultiBinary) and leaf.shape == (spaces.action.n,)
