"""Workers of a fleet on a Ray cluster: `headrace ray`.

    headrace ray workers (driver) ── one actor a worker ──▶ WorkerActor ── socket ──▶ guard.py ──▶ headrace worker

Ray places the actors and starts them again. Each actor runs a group of one worker, which talks to the broker by ZeroMQ
as on any other machine, and tells of what was killed. No steps and no weights go through Ray.
"""
