"""Reads a fleet to show it: facts of one moment, findings, and views for terminals, browsers and Prometheus."""
