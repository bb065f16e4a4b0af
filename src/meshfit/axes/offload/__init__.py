"""What lives in host memory: optimizer state (optimizer.py), activations (activations.py); parameters: see shard."""
