"""Imported last by a warm worker of `benchmarks.warm`, which so says that it is ready."""

import os

from benchmarks.job import mark

mark("warm", -1, -1, pid=os.getpid())
