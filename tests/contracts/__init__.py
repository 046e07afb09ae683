"""One suite for every implementation of a port: what the simulator's fakes promise, the real ones keep."""
