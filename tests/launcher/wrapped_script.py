"""A wrapped function that says when it runs, and goes on for ever."""

import threading

import inprocess


@inprocess.Wrapper()
def run(call: inprocess.CallWrapper = None) -> None:
    print("<running>", flush=True)
    never = threading.Event()
    while not never.wait(0.1):
        call.ping()


if __name__ == "__main__":
    run()
