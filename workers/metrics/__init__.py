"""What a runner counts and measures."""
