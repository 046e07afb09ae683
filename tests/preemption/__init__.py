"""Ranks that are asked to leave at random moments, under each launcher: `python -m tests.preemption --help`."""
