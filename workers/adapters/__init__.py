"""Vectors of envs for learners of other libraries, which step their envs by themselves."""
