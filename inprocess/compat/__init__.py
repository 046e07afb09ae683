"""Programs that were written for another library of this kind, unchanged: its module's name means this library.

``import inprocess.compat.nvrx`` does it for nvidia-resiliency-ext; ``python -m inprocess.compat script.py`` does it
before the script begins. Nothing happens before one of the two.
"""
