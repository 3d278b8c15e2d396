"""A trained policy at work: evaluation, videos, and the trial of env and policy before anything starts."""
