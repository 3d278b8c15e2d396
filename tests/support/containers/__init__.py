"""Containers as their engines would run them: manifests, compose services, and a sandbox for their commands."""
