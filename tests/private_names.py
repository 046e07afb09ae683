"""The private names of torch that the library uses, and what a version of torch has of them.

    python -m tests.private_names            # which of them this torch lacks; status 1 where the page does not say so
    python -m tests.private_names --write    # ... and into the table of docs/versions.md, a column for this version
    python -m tests.private_names --new      # what torch.distributed has that it had not in 2.13: one page
    python -m tests.private_names --list DIR > tests/torch_2_13.txt   # of the folder torch/ of another version

The names are found in the source: what begins with an underscore, is no name of the library's own, and stands as an
attribute, in an import, or in a string that is looked up. `NAMES` says where torch has each, so that it can be looked
for; `OTHERS` are those of the interpreter and of other packages. One that is in neither fails a test: somebody has to
say in docs/versions.md what happens without it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import mmap
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/versions.md"
LISTING = Path(__file__).with_name("torch_2_13.txt")
BEGIN, END = "<!-- private names: python -m tests.private_names --write -->", "<!-- end of private names -->"

_C10D, _BINDINGS, _GROUP = "torch.distributed.distributed_c10d", "torch._C._distributed_c10d", "ProcessGroup"
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent."
_PROCESSES = "torch.distributed.elastic.multiprocessing.api:"
_EXECUTOR = "torch.distributed.checkpoint._async_process_executor"

#: name in the source -> where torch has it. After a colon: attributes, or with a slash a word of the module's source,
#: for what objects get only when they are made, and for names that the library puts together
NAMES = {
    "_C": "torch._C",
    "_distributed_c10d": _BINDINGS,
    "_autograd": "torch._C._autograd",
    "_ops": "torch._ops",
    "_library": "torch._library",
    "_utils": "torch.utils.data._utils",
    "_inductor": "torch._inductor",
    "_dynamo": "torch._dynamo",
    "_debug_get_cache_entry_list": "torch._dynamo.eval_frame:_debug_get_cache_entry_list",
    "_functional_collectives": "torch.distributed._functional_collectives",
    "_symmetric_memory": "torch.distributed._symmetric_memory",
    "_collective_utils": "torch.distributed.tensor._collective_utils",
    "_redistribute": "torch.distributed.tensor._redistribute",
    "_async_process_executor": _EXECUTOR,
    "_async_thread_executor": "torch.distributed.checkpoint._async_thread_executor",
    "_fsspec_filesystem": "torch.distributed.checkpoint._fsspec_filesystem",
    "_context_parallel": "torch.distributed.tensor.experimental._context_parallel",
    "_attention": "torch.distributed.tensor.experimental._context_parallel._attention",
    # groups
    "_world": f"{_C10D}:_world",
    "_update_default_pg": f"{_C10D}:_update_default_pg",
    "_new_process_group_helper": f"{_C10D}:_new_process_group_helper",
    "_get_default_store": f"{_C10D}:_get_default_store",
    "_coalescing_manager": f"{_C10D}:_coalescing_manager",
    "_distributed_excepthook": f"{_C10D}/_distributed_excepthook",
    "_unregister_all_process_groups": f"{_BINDINGS}:_unregister_all_process_groups",
    "_get_work_registry_size": f"{_BINDINGS}:_get_work_registry_size",
    "_dump_fr_trace": f"{_BINDINGS}:_dump_fr_trace",
    "_dump_nccl_trace": f"{_BINDINGS}:_dump_nccl_trace",
    "_reset_fr_recording_nccl": f"{_BINDINGS}:_reset_fr_recording_nccl",
    "_reset_fr_trace": f"{_BINDINGS}:_reset_fr_trace",
    "_get_backend": f"{_BINDINGS}:{_GROUP}._get_backend",
    "_device_types": f"{_BINDINGS}:{_GROUP}._device_types",
    "_start_coalescing": f"{_BINDINGS}:{_GROUP}._start_coalescing",
    "_end_coalescing": f"{_BINDINGS}:{_GROUP}._end_coalescing",
    "_get_sequence_number_for_group": f"{_BINDINGS}:{_GROUP}._get_sequence_number_for_group",
    "_group_start": f"{_BINDINGS}:ProcessGroupNCCL._group_start",
    "_group_end": f"{_BINDINGS}:ProcessGroupNCCL._group_end",
    "_c10d_functional": "torch.distributed._functional_collectives/_c10d_functional",
    "_c10d_functional_autograd": "torch.distributed._functional_collectives/_c10d_functional_autograd",
    "_c10d_init": "torch._C:_c10d_init",
    "_group_name_to_store": "torch.distributed._symmetric_memory:_group_name_to_store",
    "_group_name_to_workspace_tensor": "torch.distributed._symmetric_memory:_group_name_to_workspace_tensor",
    "_gen_transform_infos": "torch.distributed.tensor._redistribute:_gen_transform_infos",
    "_op_dispatcher": "torch.distributed.tensor:DTensor._op_dispatcher",
    "_clear_DTensor_sharding_propagator_cache": "torch._C:_clear_DTensor_sharding_propagator_cache",
    # the state of a thread
    "_ForceDispatchKeyGuard": "torch._C:_ForceDispatchKeyGuard",
    "_InferenceMode": "torch._C:_InferenceMode",
    "_dispatch_tls_local_include_set": "torch._C:_dispatch_tls_local_include_set",
    "_dispatch_tls_local_exclude_set": "torch._C:_dispatch_tls_local_exclude_set",
    "_get_torch_function_state": "torch._C:_get_torch_function_state",
    "_set_torch_function_state": "torch._C:_set_torch_function_state",
    "_len_torch_function_stack": "torch._C:_len_torch_function_stack",
    "_pop_torch_function_stack": "torch._C:_pop_torch_function_stack",
    "_push_on_torch_function_stack": "torch._C:_push_on_torch_function_stack",
    "_len_torch_dispatch_stack": "torch._C:_len_torch_dispatch_stack",
    "_pop_torch_dispatch_stack": "torch._C:_pop_torch_dispatch_stack",
    "_get_sequence_nr": "torch._C._autograd:_get_sequence_nr",
    "_top_saved_tensors_default_hooks": "torch._C._autograd:_top_saved_tensors_default_hooks",
    "_pop_saved_tensors_default_hooks": "torch._C._autograd:_pop_saved_tensors_default_hooks",
    "_GLOBAL_DEVICE_CONTEXT": "torch:_GLOBAL_DEVICE_CONTEXT",
    "_error_if_any_worker_fails": "torch._C:_error_if_any_worker_fails",
    "_MultiProcessingDataLoaderIter": "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
    "_KinetoProfile": "torch.profiler.profiler:_KinetoProfile",
    "_transit_action": "torch.profiler:profile._transit_action",
    "_qualified_op_name": "torch._ops/_qualified_op_name",
    "_name": "torch._ops/_name",
    # what torch keeps between iterations
    "_disable_profiler": "torch.autograd.profiler:_disable_profiler",
    "_run_on_profiler_stop": "torch.autograd.profiler:_run_on_profiler_stop",
    "_profiler_enabled": "torch._C._autograd:_profiler_enabled",
    "_init_counter": "torch.distributed.rpc/_init_counter",
    "_all_gather_sequence_id": "torch.distributed.rpc.api/_all_gather_sequence_id",
    "_all_gather_sequence_id_to_states": "torch.distributed.rpc.api/_all_gather_sequence_id_to_states",
    "_is_current_rpc_agent_set": "torch.distributed.rpc.api:_is_current_rpc_agent_set",
    "_DEBUG_SERVER_PROC": "torch.distributed.debug:_DEBUG_SERVER_PROC",
    "_WORKER_SERVER": "torch.distributed.debug:_WORKER_SERVER",
    "_AsyncCheckpointProcess": f"{_EXECUTOR}:_AsyncCheckpointProcess",
    "_ProcessBasedAsyncCheckpointExecutor": f"{_EXECUTOR}:_ProcessBasedAsyncCheckpointExecutor",
    "_CHECKPOINT_PROCESS": f"{_EXECUTOR}:_CHECKPOINT_PROCESS",
    "_execute_save_impl": f"{_EXECUTOR}:_ProcessBasedAsyncCheckpointExecutor._execute_save_impl",
    "_save_process": f"{_EXECUTOR}/_save_process",
    "_wait_for_response": f"{_EXECUTOR}:_AsyncCheckpointProcess._wait_for_response",
    "_DistWrapper": "torch.distributed.checkpoint.utils:_DistWrapper",
    "_replaced_functions": "torch.distributed.tensor.experimental._context_parallel._attention:_replaced_functions",
    "_restore_function": "torch.distributed.tensor.experimental._context_parallel._attention:_restore_function",
    "_per_optimizer_states": "torch.amp.grad_scaler/_per_optimizer_states",
    # tensors, the GPU
    "_version": "torch:Tensor._version",
    "_buffers": "torch.nn.modules.module/_buffers",
    "_metadata": "torch.nn.modules.module/_metadata",
    "_is_cow_tensor": "torch._C:_is_cow_tensor",
    "_is_view": "torch:Tensor._is_view",
    "_sleep": "torch.cuda:_sleep",
    "_backward_hooks": "torch:Tensor._backward_hooks",
    "_post_accumulate_grad_hooks": "torch:Tensor._post_accumulate_grad_hooks",
    "_is_": "torch._C:_is_multithreading_enabled",
    "_set_": "torch._C:_set_multithreading_enabled",
    "_enabled": "torch._C:_is_multithreading_enabled",
    "_global_": "torch.nn.modules.module:_global_forward_hooks",
    "_global_optimizer_": "torch.optim.optimizer:_global_optimizer_pre_hooks",
    # the launcher
    "_worker_group": "torch.distributed.elastic.agent.server.api/_worker_group",
    "_assign_worker_ranks": f"{_AGENT}_assign_worker_ranks",
    "_initialize_workers": f"{_AGENT}_initialize_workers",
    "_restart_workers": f"{_AGENT}_restart_workers",
    "_set_local_rank_env": f"{_AGENT}_set_local_rank_env",
    "_setup_healthcheck": f"{_AGENT}_setup_healthcheck",
    "_setup_local_watchdog": f"{_AGENT}_setup_local_watchdog",
    "_check_uninterruptible_state_timeout": f"{_AGENT}_check_uninterruptible_state_timeout",
    "_uninterruptible_state_timeout": f"{_AGENT[:-19]}/_uninterruptible_state_timeout",
    "_logs_specs": f"{_AGENT[:-19]}/_logs_specs",
    "_exit_barrier_timeout": "torch.distributed.elastic.agent.server.api/_exit_barrier_timeout",
    "_registry": "torch.distributed.elastic.rendezvous.api/_registry",
    "_store": "torch.distributed.elastic.rendezvous.dynamic_rendezvous/_store",
    "_this_node": "torch.distributed.elastic.rendezvous.dynamic_rendezvous/_this_node",
    "_stop_heartbeats": "torch.distributed.elastic.rendezvous.dynamic_rendezvous:"
    "DynamicRendezvousHandler._stop_heartbeats",
    "_numa_options": f"{_PROCESSES[:-1]}/_numa_options",
    "_pc": f"{_PROCESSES[:-1]}/_pc",
    "_return_values": f"{_PROCESSES[:-1]}/_return_values",
    "_maybe_wrap_with_numa_binding": "torch.numa.binding:_maybe_wrap_with_numa_binding",
}
#: of the interpreter, of other packages, parts of words, and folders of the library's own that look like such names
OTHERS = frozenset(
    """
    _current_frames _current_exceptions _getframe _Environ _is_owned _GeneratorContextManager
    _get_running_loop _set_running_loop _on_sigint _ConnectionBase _start_executor_manager_thread
    _run_module_as_main _run_exitfuncs _ncallbacks _actions _option_string_actions _fixtureinfo _forkserver
    _forkserver_alive_fd _forkserver_pid _resource_tracker _stdout _FileHandler _LiveLoggingNullHandler
    _LiveLoggingStreamHandler _callback_metrics _checkpoint_connector _loaded_checkpoint _logger_connector
    _initial_global_step _reset_state _register_deepspeed_module _id _b _ahead _inheriting
    """.split()  # noqa: SIM905  (two words a line would be two pages)
)


# --- what the source uses -------------------------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_Z")) and bool(name.strip("_"))


def own_names(nodes: Sequence[ast.AST]) -> set[str]:
    """What a file of the library defines itself."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                found |= {part.value for part in ast.walk(value) if isinstance(part, ast.Constant)}
    return found


def candidates(nodes: Sequence[ast.AST], own: set[str]) -> Iterator[str]:
    """Names that may be somebody else's: attributes, parts of imported modules, strings that look like names.

    Args:
        own: what the file defines itself. Attributes of what is not ``self`` count all the same where torch has one of
            this name.
    """
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Attribute(attr=name, value=value):
                if name not in own or (name in NAMES and not _is_own_object(value)):
                    yield name
            case ast.Import(names=names):
                yield from (part for each in names for part in each.name.split("."))
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.split(".")[0] != "inprocess":
                yield from module.split(".")
                yield from (each.name for each in names)
            case ast.Constant(value=str(text)) if id(node) not in prose and re.fullmatch(r"[\w.:]+", text):
                yield from (part for part in re.split(r"[.:]", text) if part not in own)


def _is_own_object(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


@functools.cache
def uses(package: Path = ROOT / "inprocess") -> dict[str, set[str]]:
    """Private names that are not the library's own -> the files that use them, without the suffix."""
    files = {path: list(ast.walk(ast.parse(path.read_text()))) for path in sorted(package.rglob("*.py"))}
    ours = {path: own_names(nodes) for path, nodes in files.items()}
    everywhere = set().union(*ours.values())
    found: dict[str, set[str]] = {}
    for path, nodes in files.items():
        for name in candidates(nodes, ours[path]):
            if is_private(name) and (name in NAMES or name not in everywhere):
                found.setdefault(name, set()).add(path.relative_to(package).with_suffix("").as_posix())
    return found


def of_torch() -> dict[str, set[str]]:
    """File of the library -> the names of torch's that it uses, as torch has them."""
    found: dict[str, set[str]] = {}
    for name, files in uses().items():
        for file in files if name in NAMES else ():
            found.setdefault(file, set()).add(name)
    return found


# --- what torch has -------------------------------------------------------------------------------------------------


def has(name: str) -> bool:
    """Whether the installed torch has it where `NAMES` says."""
    place = NAMES[name]
    module, _, word = place.partition("/")
    if word:
        spec = importlib.util.find_spec(module)
        return spec is not None and re.search(rf"\b{word}\b", Path(str(spec.origin)).read_text()) is not None
    module, _, path = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split(".") if path else ():
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True


def missing() -> set[str]:
    """Of the names that the source uses."""
    return {name for name in uses() if name in NAMES and not has(name)}


# --- the table ------------------------------------------------------------------------------------------------------


def table(page: str) -> tuple[list[str], dict[str, list[str]]]:
    """Of the page: its versions, and for each file its names and what each version has."""
    lines = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    versions = rows[0][2:] if rows else []
    return versions, {row[0].strip("`"): row[1:] for row in rows[2:]}


def names_in(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", cell))


def explained(page: str) -> str:
    """The part of the page that is written by hand: what happens without a name."""
    return page.partition("## What is torch's own")[2].partition(BEGIN)[0]


def stated(page: str, version: str) -> set[str]:
    """What this version lacks, by the page."""
    versions, rows = table(page)
    place = versions.index(version) + 1 if version in versions else None
    return set().union(*(names_in(row[place]) for row in rows.values())) if place else set()


def rewritten(page: str, version: str, lacking: Collection[str]) -> str:
    """The page with this version's column, and the rows that the source has now."""
    versions, rows = table(page)
    columns = sorted({*versions, version}, key=lambda each: [int(part) for part in re.findall(r"\d+", each)])
    lines = [f"| where | names | {' | '.join(columns)} |", f"| --- | --- |{' --- |' * len(columns)}"]
    for file, names in sorted(of_torch().items()):
        old = dict(zip(versions, rows.get(file, [""])[1:], strict=False))
        changed = names_in(rows.get(file, [""])[0]) != names
        cells = []
        for each in columns:
            if each == version:
                lacks = sorted(names.intersection(lacking))
                cells.append("all" if not lacks else "not " + ", ".join(f"`{name}`" for name in lacks))
            else:
                cells.append("" if changed else old.get(each, ""))
        lines.append(f"| `{file}` | {', '.join(f'`{name}`' for name in sorted(names))} | {' | '.join(cells)} |")
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


# --- what torch.distributed has -------------------------------------------------------------------------------------

_VARIABLES = re.compile(
    rb"\b(?:TORCH_(?:NCCL2?|FR|DIST|DISTRIBUTED|GLOO|SYMM_?MEM|WATCHDOG)_[A-Z0-9_]+|TORCHELASTIC_\w+)"
)


def listing(folder: Path) -> set[str]:
    """One line for each class, table, method and variable; read from files, so that nothing is imported."""
    found: set[str] = set()
    for path in sorted((folder / "distributed").rglob("*.py")):
        text = path.read_bytes()
        found |= {f"variable {name.decode()}" for name in _VARIABLES.findall(text)}
        module = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
        if module == _C10D or not any(is_private(part) for part in module.split(".")):
            found |= set(_definitions(ast.parse(text), module))
    found |= set(_methods(ast.parse((folder / "_C/_distributed_c10d.pyi").read_bytes())))
    for library in sorted((folder / "lib").glob("libtorch_*.so")):
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found |= {f"variable {name.decode()}" for name in _VARIABLES.findall(content)}
    return found


def _definitions(tree: ast.Module, module: str) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and (module == _C10D or not is_private(node.name)):
            yield f"class {module}.{node.name}"
            if node.name == "_World":
                yield from (f"table {each.name}" for each in node.body if isinstance(each, ast.FunctionDef))
        elif isinstance(node, ast.FunctionDef) and module == _C10D:
            yield f"function {module}.{node.name}"


def _methods(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield f"class {_BINDINGS}.{node.name}"
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    yield f"method {node.name}.{each.name}"
        elif isinstance(node, ast.FunctionDef):
            yield f"function {_BINDINGS}.{node.name}"


def new(before: set[str], after: set[str]) -> str:
    """One page: what came and what went, by kind."""
    lines = []
    for title, some in (("new", after - before), ("gone", before - after)):
        for kind in sorted({each.partition(" ")[0] for each in some}):
            names = sorted(each.partition(" ")[2] for each in some if each.startswith(f"{kind} "))
            lines += [f"{title}: {kind} ({len(names)})", *(f"  {name}" for name in names)]
    return "\n".join(lines) or "nothing is new"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.private_names", description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="a column of docs/versions.md for this torch")
    parser.add_argument("--new", action="store_true", help="what torch.distributed has that it had not in 2.13")
    parser.add_argument("--list", type=Path, metavar="DIR", help="print the listing of a folder torch/")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(sorted(listing(options.list))))
        return 0
    import torch

    version = torch.__version__.partition("+")[0]
    if options.new:
        print(f"torch.distributed of {version}, beside that of 2.13.0")
        print(new(set(LISTING.read_text().splitlines()), listing(Path(torch.__file__).parent)))
        return 0
    unknown = sorted(uses().keys() - NAMES.keys() - OTHERS)
    for name in unknown:
        print(f"{name} ({', '.join(sorted(uses()[name]))}): whose is it? See tests/private_names.py")
    lacking = missing()
    print(f"torch {torch.__version__} lacks: {', '.join(sorted(lacking)) or 'none of the private names'}")
    if options.write:
        PAGE.write_text(rewritten(PAGE.read_text(), version, lacking))
    unforeseen = sorted(lacking - stated(PAGE.read_text(), version))
    if unforeseen:
        print(f"docs/versions.md does not say so of {', '.join(unforeseen)}: see what happens without, and --write")
    return bool(unknown or unforeseen)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
