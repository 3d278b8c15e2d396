"""Loggers of a run: where the rows of `headrace up` go. Files, TensorBoard, Weights & Biases, MLflow, and your own."""

from headrace.deploy.loggers.protocol import Logger as Logger
from headrace.deploy.loggers.protocol import Row as Row
from headrace.deploy.loggers.protocol import RunInfo as RunInfo

__all__ = ["Logger", "Row", "RunInfo"]
