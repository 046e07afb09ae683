"""A wrapped function of which one rank raises once."""

import os

import inprocess


@inprocess.Wrapper()
def run(call: inprocess.CallWrapper = None) -> None:
    call.ping()
    if call.iteration == 0 and os.environ["RANK"] == "1":
        raise ValueError("once")


if __name__ == "__main__":
    run()
