"""Loggers of services: TensorBoard, Weights & Biases, MLflow."""
