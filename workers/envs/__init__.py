"""Environments: how they are found and built, stepped together, checked, and rebuilt when they fail."""
