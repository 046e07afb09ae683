"""What torch itself remembers of groups that are gone: forgotten when the function was left, and between iterations.

In the main thread, whose memory it partly is. Where torch keeps it elsewhere, one iteration's groups stay.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch.distributed as dist

from inprocess.system.errors import in_words
from inprocess.system.logs import get_logger

__all__ = ["Remembered", "remembered"]

log = get_logger(__name__)
#: what DTensor remembers of operations it has seen, by mesh
MESHES = (
    "torch._C:_clear_DTensor_sharding_propagator_cache",
    "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear",
    "torch.distributed.tensor._redistribute:_gen_transform_infos.cache_clear",
    "torch.distributed.tensor._redistribute:clear_redistribute_planner_cache",
    "torch.distributed.tensor._collective_utils:MeshTopoInfo.build_from_mesh.cache_clear",
)
#: what is of no use after an abort: stores and buffers of symmetric memory, by names of groups, which the next ones
#: have too
ABORTED = (
    "torch.distributed._symmetric_memory:_group_name_to_store.clear",
    "torch.distributed._symmetric_memory:_group_name_to_workspace_tensor.clear",
)
#: compiled code, which would go on to replay graphs that were reset: it is compiled again
COMPILED = ("torch.compiler:reset",)
#: modules whose functions have the default group for a default argument. It is the one of the moment at which they are
#: imported; DistributedDataParallel does that inside the function (torch 2.9 to 2.15). The group would stay for ever,
#: and the next iteration's collectives would use it
_WITH_DEFAULTS = ("torch.distributed.nn.functional", "torch.distributed.optim.zero_redundancy_optimizer")


class Remembered:
    """Of one process; a `Part` of a call."""

    def __init__(self) -> None:
        #: since `forget`
        self._aborted = self._graphs_were_reset = False

    def aborted(self) -> None:
        """Groups were."""
        self._aborted = True

    def graphs_were_reset(self) -> None:
        """The CUDA graphs of this process can be replayed no more."""
        self._graphs_were_reset = True

    def collect(self) -> None:
        """The function was left."""
        forget_meshes()
        _forget_defaults()

    def forget(self) -> None:
        """Another iteration is decided, or the call is over."""
        forget_meshes()
        if self._aborted:
            forget(ABORTED)
        if self._graphs_were_reset and _has_compiled_graphs():
            forget(COMPILED)
        self._aborted = self._graphs_were_reset = False


def _has_compiled_graphs() -> bool:
    """Whether the compiler recorded CUDA graphs of its own in this thread."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    try:
        containers = trees.get_obj(trees.local, "tree_manager_containers")
        return any(container.tree_manager is not None for container in containers.values())
    except Exception:  # not imported, not used, or kept elsewhere
        return False


def forget_meshes() -> None:
    if "torch.distributed.tensor" in sys.modules:
        forget(MESHES)


def _forget_defaults() -> None:
    """None stands for the default group of the moment at which a function is called."""
    for name in _WITH_DEFAULTS:
        for function in list(vars(sys.modules.get(name, object)).values()):
            if type(function) is FunctionType and any(map(_is_group, function.__defaults__ or ())):
                defaults = function.__defaults__ or ()
                function.__defaults__ = tuple(None if _is_group(each) else each for each in defaults)


def _is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup)


def forget(names: Sequence[str]) -> None:
    """Call these, each as ``"module:name"``, as far as they are there."""
    for name in names:
        module, _, path = name.partition(":")
        try:
            operator.attrgetter(path)(sys.modules.get(module))()
        except AttributeError:  # not imported, or elsewhere
            continue
        except Exception as error:  # a GPU that is lost
            log.debug("%s failed: %s", name, in_words(error))


#: one per process
remembered = Remembered()
