"""The broker's reports to Redis."""
