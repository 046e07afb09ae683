"""Found through ``sys.path`` by a process that multiprocessing started anew; see `inprocess.compat.alias`."""

import importlib
import sys

del sys.modules[__name__]  # nobody has imported anything from it

import inprocess.compat.nvrx  # noqa: E402, F401

importlib.import_module(__name__)  # what the finder gives out now
