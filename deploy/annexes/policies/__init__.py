"""Use of trained policies: evaluation, videos, and the trial of env and policy before a start."""
