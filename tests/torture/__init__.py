"""Interrupts a function of every kind at every kind of moment, millions of times: `python -m tests.torture --help`.

Real threads and real signals, no torch, no pytest: it runs on any Python that the library supports. A seed chooses
what is run and when it is interrupted; what the threads make of that differs from run to run.
"""
