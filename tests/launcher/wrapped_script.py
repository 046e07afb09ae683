"""A wrapped function that says when it runs, and goes on for ever. Arguments: signals that ask it to leave."""

import signal
import sys
import threading

import inprocess


@inprocess.Wrapper(leave_signals=[signal.Signals[name] for name in sys.argv[1:] or ["SIGTERM"]])
def run(call: inprocess.CallWrapper = None) -> None:
    print("<running>\n", end="", flush=True)
    never = threading.Event()
    while not never.wait(0.1):
        call.ping()


if __name__ == "__main__":
    run()
