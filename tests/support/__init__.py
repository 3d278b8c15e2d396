"""Helpers of several tests. No test module imports another one."""
