"""Streams of random numbers, one for each env and use."""
