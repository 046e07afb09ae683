"""The training state that survives restarts in memory: see ``state.LiveState``."""
