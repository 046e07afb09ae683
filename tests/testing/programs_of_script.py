"""What the script imports from its own folder."""

STEPS = 5
