"""What a restart ends: process groups, their communicators and connections, for Gloo and NCCL.

How a group ends, in order. In the MonitorThread, while the main thread may wait in a collective (`abort`):

1. This rank's connections to the iteration's own store are shut down (`call.user_code.UserCode.abort`).
2. A shutdown by the program that begins now becomes an abort; one that has begun is given up (`nccl_shutdown`).
3. Flight records are written, where they are asked for (`nccl`).
4. Reading ends on Gloo's connections, and copies of them are kept (`gloo`, `dead_connections`).
5. A communicator of NCCL in the making is cut off (`nccl_bootstrap`).
6. At the same time, in a thread each: every group is aborted, the bootstrap is cut again, NCCL's service threads are
   woken (`nccl_wake`), CUDA graphs are reset (`nccl`).
7. NCCL's flight recorder forgets the iteration (`nccl`).
8. Results that nobody has waited for are noted (`results`), torch forgets its groups (`groups`), and they are kept
   (`dead_groups`).
9. Step 4 again, if the main thread is making a group.
10. The main thread is interrupted until it has left the function. What it begins meanwhile is released: steps 4 and 5,
    and operations that Gloo has lost (`UserCode.release`, `gloo_lost`).

In the main thread, when the function was left:

11. What an exception has left open of NCCL's group calls is ended (`coalescing`), before the others are told.
12. Steps 2 to 9 again, if the function has made groups meanwhile (`call.restart.Restarting.wait_for_abort`).
13. What libraries keep is reset, results are waited for (`results`), torch's caches of meshes and its default arguments
    are forgotten (`remembered`), and cycles that have a group are collected (`dead_groups`): `call.parts`.

All say in the end round that they have left the function. After it:

14. Groups that nothing else refers to are set aside, what torch remembers by their names is forgotten, and the copies
    of connections are closed.
15. Once the function runs again, the groups that were set aside are freed in a thread (`dead_groups.free`). Groups that
    the program refers to stay until it does not, or until the call ends.

An abort hook of the user's own replaces steps 2 to 9. Step 10 is the library's, unless ``abort=None``.
"""
