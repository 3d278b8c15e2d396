"""Envs of other libraries as ours, and ours as those of learners of other libraries, which step envs themselves."""
