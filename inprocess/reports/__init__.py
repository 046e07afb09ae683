"""What the events of a job mean: its incidents, each with a verdict. Reads a run directory; never runs in a rank."""
