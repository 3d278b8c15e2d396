"""What has happened in a run: progress, rows, the summary, and the audit of its books."""
