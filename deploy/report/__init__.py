"""Reports of a run: progress, rows, the summary, and the audit of its books."""
