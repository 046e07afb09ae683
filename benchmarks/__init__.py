"""Benchmarks: each script measures one thing for one library and prints JSON; `python -m benchmarks` runs them all."""
