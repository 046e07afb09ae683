"""The monitor process: heartbeats for its rank, killing it when it hangs, speaking for it when it is dead; and what
the rank's own process knows of it.

``program`` is what runs there. It does not import torch before the store needs it, so it starts quickly.
"""
