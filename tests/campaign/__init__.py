"""How often a report is right: real faults in real processes, each several times. `python -m tests.campaign --help`."""
