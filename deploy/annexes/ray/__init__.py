"""Workers of a fleet on a Ray cluster: `headrace ray`.

    headrace ray workers (driver) ── one actor a worker ──▶ WorkerActor ── socket ──▶ guard.py ──▶ headrace worker

Ray places and restarts the actors. Each actor runs a group of one worker, which talks to the broker by ZeroMQ as on any
other machine, and sends the obituaries of killed workers. No steps and no weights go through Ray.
"""
