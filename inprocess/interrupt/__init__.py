"""Raising in the main thread, at any moment that is safe, and nowhere else.

The race
--------
Another thread (the monitor thread) wants ``RankShouldRestart`` raised in the main thread, but only while that thread
runs the user's function. The main thread may leave the function at any moment, by returning or raising, and then
runs the library's code, later the caller's. An interruption that comes a moment late would be raised there, where
nobody expects it, and would break the restart, or the program.

What does not work
~~~~~~~~~~~~~~~~~~
*Asking another thread's interpreter to raise* (``PyThreadState_SetAsyncExc``). Between asking and raising lies any
amount of bytecode, so the exception may be due after the function was left. A lock around a flag does not help: the
exception can be raised inside the very lines that take the lock or clear what is pending, and a second one inside the
handler that received the first. Nor does it end a ``time.sleep`` or ``queue.get``.

*A flag that is set before the function and cleared after it*, read by a signal handler. The handler runs in the main
thread, so flag and handler never overlap. But the clearing line belongs to a ``finally`` or ``except`` block, and the
flag is still up when that block begins; an exception raised just there leaves the block half done.

What works
~~~~~~~~~~
The window is the call stack itself. Python runs signal handlers in the main thread, between two bytecodes or inside an
interruptible system call, and hands them the frame they interrupt. The handler walks from that frame outwards. If it
meets the frame of ``frames.call``, whose only line calls the user's function, the main thread is in user code: raising
is safe, because ``Gate.run`` catches everything that leaves ``call``. If it meets ``Gate.run`` first, or neither, the
main thread is in the library's or the caller's code: the handler does nothing, and the monitor thread sends again a
few milliseconds later. There is nothing to open or to close, hence nothing to be late for, and it costs nothing
while nothing happens.

What is not interrupted inside the window: this room's own lines, those of ``atomic``, those that hand over one of this
library's log lines, and those of the handler at work on an earlier signal, where a raise could leave a lock held, and
whatever runs on top of them (a destructor, another handler); for a tenth of a second, the logging module and the lines
that take the lock of a condition, an event, a queue or a thread that starts, or one that multiprocessing shares, for
the same reason: that thread would never come up; for half a second, the lines that give such a lock back; for two
seconds, torch's functional collectives, between the begin of one and the moment when somebody has its result, and the
code that takes a tensor from another process, such as a DataLoader's worker, whose descriptor is a bare number for a
moment; and for ten seconds, an import, since a module left half imported stays broken in every later iteration, and the
construction of a DataLoader's iterator or the start of a process: there is a moment when the process runs and nobody
has noted it, who could end it.

Losing the signal
~~~~~~~~~~~~~~~~~
One signal is not enough. It can arrive after Python last looked for signals and before the thread falls asleep in a
system call: then the handler would run only when that call ends by itself. So the monitor thread sends again, soon at
first and then less often, until the handler says that it has raised. From the second time on it also calls
``PyErr_SetInterruptEx``, which makes Python run the handler even where the thread's signal mask, or a handler set by C
code, keeps the signal itself away. If the program replaced the Python handler, a pending call puts ours back as soon
as the main thread runs bytecode; where it runs none, in a system call, signals that end up in the program's handler
make it do so. That handler still gets every signal that is not an interruption, and is back in its place in the end.

The kernel keeps every single real-time signal until it is handled, up to RLIMIT_SIGPENDING for all processes of a user
together, and refuses one more. It needs no such place for a signal to the process as a whole, which the main thread
receives first.

C code that neither returns nor answers signals (a collective, a kernel) is not reached by any of these: that is what
``abort`` is for, and after it the hard timeout. A greenlet other than the main one is not reached either: its frames
are not connected to ours.

Waiting for the interpreter
~~~~~~~~~~~~~~~~~~~~~~~~~~~
The abort comes first, while the main thread still runs the function. Where that computes in Python, the abort waits for
the interpreter lock again and again, and for a processor where there are fewer of them than ranks. So the same handler
first *parks* the main thread: it waits until the abort is done, and for ``PARK`` seconds at most, since the abort may
need something, a lock for example, that the function holds. The signal that interrupts then usually finds it still in
the handler, which looks once more before it ends.

Losing the exception
~~~~~~~~~~~~~~~~~~~~
User code may swallow it: ``except BaseException``, a ``__del__``, a callback from C. If the function has not been left
``retry_after`` seconds after a raise (time for its ``finally`` blocks), it is raised again. The log says where it was
raised before, the first time and then rarely. What Python itself drops (``sys.unraisablehook``) is noticed at once and
raised again at once.

What Python 3.12 leaves behind
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where a loop runs inside `finally`, `except` or `with`, its compiler forgets one jump in the table of what to undo. An
exception that a signal handler raises right there leaves another one marked as being handled, for ever: it would keep
the frames of a dead iteration alive, and become the context of every later exception, an exit for example, which would
be taken for an answer to the interruption. So the gate puts back what was being handled before.
"""
