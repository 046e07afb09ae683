"""A script with an argument, as it is given to Python."""

import sys
from pathlib import Path

import programs_of_script

import inprocess


@inprocess.Wrapper()
def main(call: inprocess.CallWrapper = None):
    for _ in range(programs_of_script.STEPS):
        call.ping()


if __name__ == "__main__":
    main()
    Path(sys.argv[1]).write_text(f"{sys.argv[2]} {__file__}")
