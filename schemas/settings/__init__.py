"""Settings: sections of fields, how files, environment and flags make them, and code that they name."""
