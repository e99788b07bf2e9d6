"""The science of federated continual learning: plain PyTorch, knowing neither Prefect nor MLflow nor DVC."""
