"""Trained policies of runs: found, checked against the settings, and built."""
