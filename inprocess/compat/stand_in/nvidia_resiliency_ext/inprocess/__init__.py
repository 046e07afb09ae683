"""Found through ``sys.path`` by a process that multiprocessing started anew; see `inprocess.compat.alias`."""

import sys

del sys.modules[__name__]  # nobody has imported anything from it

import inprocess.compat.nvrx  # noqa: E402

sys.modules[__name__] = inprocess
