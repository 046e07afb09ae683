"""What libraries keep per process, and how it is made to fit the next iteration.

A restart keeps the process, so what a library has noted of the last iteration stays: its process groups, which are
aborted, its rank, its world size. Each file here knows one library, says with which versions it was tried, imports
nothing of it, and does nothing where the program has not imported it. `registry` is what the call asks.
"""
