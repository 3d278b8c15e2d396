"""What a person sees: standard streams that may be gone, colours, log lines and their files, settings as text."""
