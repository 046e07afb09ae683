"""``python -m inprocess.compat script.py``: a script, or a module, to which this library has the other one's name."""

from inprocess.compat.runner import main

if __name__ == "__main__":
    main()
