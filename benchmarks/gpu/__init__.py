"""Restarts, steps and recoveries with several NCCL ranks, on one GPU too: `python -m benchmarks.gpu`."""
