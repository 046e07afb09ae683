"""Real rank processes with faults: every row of the fault table, each test under one deadline."""
