"""Terminal output: standard streams, colours, log lines and their files."""
