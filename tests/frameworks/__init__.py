"""Real frameworks under faults.

Their files are named so that only `nox -s frameworks` collects them: they need the packages of `constraints.txt` in
this folder, and take minutes.
"""
