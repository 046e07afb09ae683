"""Chaos: 4 to 8 real ranks train while random faults strike, by seed; the result must be exact.

`schedule` makes a job from a seed, `training` runs in the ranks, `outside` sends signals, `verdict` says what went
wrong, `play` does all of it once. `python -m tests.chaos` plays for ten minutes.
"""
