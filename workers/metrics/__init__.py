"""The counters and measurements of a runner."""
