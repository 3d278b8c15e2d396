"""Ports for browsers, and who may read there."""
