"""``python -m inprocess``: the command `inprocess`."""

import sys

from inprocess.launcher.command import main

if __name__ == "__main__":
    sys.exit(main())
