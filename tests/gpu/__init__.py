"""What needs a GPU; skipped without one. On a machine with one GPU, in a plain checkout: `python -m pytest tests/gpu`.

Needs torch with CUDA and NCCL, psutil, pytest and pytest-timeout; scikit-learn for the example.

All ranks share that GPU. NCCL refuses two ranks of one host on one GPU, so each says that it is a host of its own
(NCCL_HOSTID), and they talk over sockets on loopback.

`python -m tests.gpu.lease` runs what fits into a few minutes, most important first, and writes results after each row.

A dry run without a GPU, for whoever changes these tests: INPROCESS_GPU_TESTS_ON=cpu runs the same functions on the CPU
with Gloo. What is about CUDA itself is skipped.
"""
