"""What several tests use. No test module imports another one."""
