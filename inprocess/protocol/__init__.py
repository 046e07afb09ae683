"""The restart protocol: everything that decides what happens next lives here; nothing here does IO.

``phases`` is the life of one rank as a table, ``messages`` is what members say to each other, ``rounds`` turns a
complete round into a decision, ``membership`` is what one member knows. The verbs that carry them over a store are in
:mod:`inprocess.protocol.verbs`.
"""
