"""One call of a wrapped function: the loop over the phases, what a call holds, and the user's hooks.

Used by ``wrap`` and ``testing``; what the user's function sees of it is ``call_wrapper``.
"""
