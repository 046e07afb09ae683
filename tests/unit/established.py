"""The public names of the established API, of both its generations: what programs may have been written for.

Relative to its package; behind a colon the members of a class. Written down once; `test_migration` compares the last
with the wheel of 0.7, where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator

OLDER = """
Compose
CallWrapper
Wrapper
abort.Abort
abort.AbortTorchDistributed: shutdown_all_process_group_backends shutdown_process_group_backend
attribution.Interruption: EXCEPTION BASE_EXCEPTION SOFT_TIMEOUT HARD_TIMEOUT TERMINATED UNRESPONSIVE
attribution.InterruptionRecord: rank interruption from_str
attribution.format_interruption_records
compose.find_common_ancestor
compose.Compose
exception.RestartError
exception.RestartAbort
exception.HealthCheckError
exception.InternalError
exception.TimeoutError
finalize.Finalize
finalize.ThreadedFinalize
health_check.HealthCheck
health_check.CudaHealthCheck
health_check.FaultCounterExceeded
health_check.FaultCounter
initialize.Initialize
initialize.RetryController
logging.format_exc
logging.log_exc
logging.log_exec
logging.find_nearest_handler
logging.Logging: initialize deinitialize
monitor_process.is_process_active
monitor_process.daemonize_fn
monitor_process.MonitorProcess: run can_create_store start start_iteration shutdown
monitor_thread.RankShouldRestart
monitor_thread.async_raise
monitor_thread.delayed_async_raise
monitor_thread.reraise_if_unraisable
monitor_thread.async_abort_main_thread
monitor_thread.abort_signal_handler
monitor_thread.MonitorThread: start_monitoring run final_check_and_shutdown shutdown
param_utils.check_type
param_utils.count_type_in_params
param_utils.substitute_param_value
param_utils.enforce_subclass
param_utils.enforce_type
param_utils.enforce_value
progress_watchdog.Timestamp: auto manual
progress_watchdog.ProgressWatchdog: reset ping send is_timed_out get_automatic_timestamp run resume pause_and_drain
    spin_drain shutdown
rank_assignment.RankDiscarded
rank_assignment.RankAssignment
rank_assignment.FillGaps
rank_assignment.ShiftRanks
rank_assignment.FilterGroupedByKey: instance_count
rank_filter.RankFilter
rank_filter.MaxActiveWorldSize
rank_filter.WorldSizeDivisibleBy
sibling_monitor.terminate_unresponsive_ranks
sibling_monitor.Heartbeat: run shutdown
sibling_monitor.SiblingMonitor: check_heartbeats join
state.Status: INITIALIZED ACTIVE INACTIVE ABORTING ABORTED
state.State: rank initial_rank world_size iteration active_world_size initial_world_size status store
    get_distributed_vars set_distributed_vars activate_all_ranks advance
store.BarrierError
store.BarrierTimeout
store.BarrierOverflow
store.StoreMixin: NUM_COMPLETED_RANKS NUM_INTERRUPTED_RANKS NUM_TERMINATED_RANKS INTERRUPTION_RECORDS
    INTERRUPTION_RECORDS_LOCK TERMINATED_RANK INITIAL_RANK BASE_TERMINATED_LIST HEARTBEAT BARRIER_PREFIX
    STORE_PREFIX INITIAL_BARRIER ITERATION_BARRIER COMPLETION_BARRIER TERMINATION_BARRIER critical_ranks
    set_initial_rank get_initial_rank send_heartbeat get_heartbeat get_all_heartbeats record_base_terminated_rank
    get_base_terminated_count record_interrupted lock_interruption_records get_interruption_records
    is_any_rank_iterrupted record_completed is_any_rank_completed record_terminated_rank get_terminated_ranks
    barrier is_rank_at_reentrant_barrier reentrant_barrier initial_barrier iteration_barrier completion_barrier
    termination_barrier
store.TCPStore: TCP_STORE_HOST_RANK critical_ranks
store.PrefixStore
store.FileStore
tools.inject_fault.Fault: GPU GPU_SLEEP ASYNC_EXC SIGNAL_EXC ABORT GIL SEGFAULT INT KILL TERM STOP
tools.inject_fault.InjectedException
tools.inject_fault.async_raise
tools.inject_fault.termination_signal_handler
tools.inject_fault.async_raise_exception
tools.inject_fault.raise_gpu_error
tools.inject_fault.gpu_sleep
tools.inject_fault.lock_gil
tools.inject_fault.segfault
tools.inject_fault.send_signal
tools.inject_fault.abort
tools.inject_fault.inject_fault
wrap.HealthCheckPassed
wrap.spare_fn
wrap.Wrapper
wrap.CallWrapper: iteration ping atomic
"""

NEWER = """
Compose
CallWrapper
Wrapper
FrozenState
Mode
State
state.FrozenState
abort.Abort
abort.AbortTorchDistributed: shutdown_all_process_group_backends shutdown_process_group_backend
abort.AbortTransformerEngine
attribution.Interruption: EXCEPTION BASE_EXCEPTION SOFT_TIMEOUT HARD_TIMEOUT TERMINATED UNRESPONSIVE
    MONITOR_PROCESS_EXCEPTION
attribution.InterruptionRecord: rank interruption from_str
attribution.format_interruption_records
completion.Completion
compose.find_common_ancestor
compose.Compose
exception.RestartError
exception.RestartAbort
exception.HealthCheckError
exception.InternalError
exception.TimeoutError
finalize.Finalize
finalize.ThreadedFinalize
health_check.HealthCheck
health_check.CudaHealthCheck
health_check.FaultCounterExceeded
health_check.FaultCounter
initialize.Initialize
initialize.RetryController
monitor_process.Message: TIMESTAMP DISABLE_SIBLING_MONITOR RECORD_INTERRUPTED DAEMON_PID ITERATION_START TERMINATE
monitor_process.is_process_active
monitor_process.terminate_process
monitor_process.daemonize_fn
monitor_process.MonitorProcess: run can_create_store start disable_sibling_monitor send_timestamp record_interrupted
    start_iteration shutdown
monitor_thread.RankShouldRestart
monitor_thread.async_raise
monitor_thread.delayed_async_raise
monitor_thread.reraise_if_unraisable
monitor_thread.async_abort_main_thread
monitor_thread.MonitorThread: run maybe_join shutdown
nested_restarter.NestedRestarterLogger
nested_restarter.NestedRestarterCallback: restarter_state restarter_stage logger special_rank
nested_restarter.NestedRestarterHandlingCompleted: restarter_state restarter_stage
nested_restarter.NestedRestarterHandlingStarting: restarter_state restarter_stage
nested_restarter.NestedRestarterFinalized: restarter_state
nested_restarter.NestedRestarterAborted: restarter_state
param_utils.check_type
param_utils.count_type_in_params
param_utils.substitute_param_value
param_utils.enforce_subclass
param_utils.enforce_type
param_utils.enforce_value
progress_watchdog.Timestamp: auto manual is_timed_out
progress_watchdog.ProgressWatchdog: get_automatic_timestamp reset ping send run pause_and_synchronize
    spin_till_paused resume shutdown
rank_assignment.RankDiscarded
rank_assignment.RankAssignmentCtx: state store terminated_ranks
rank_assignment.RankAssignment
rank_assignment.RankFilter
rank_assignment.ActivateAllRanks
rank_assignment.MaxActiveWorldSize
rank_assignment.ActiveWorldSizeDivisibleBy
rank_assignment.LayerFlag: RESERVE BACKFILL
rank_assignment.Layer: min_ranks max_ranks key_or_fn flag
rank_assignment.Node: add_child is_leaf iter_leaves deactivate terminate activate assign_backfill_domain
rank_assignment.bounded_activate
rank_assignment.propagate_terminations
rank_assignment.Tree: build_tree replace_with_inactive replace_with_backfill shift_ranks filter_active_world_size
    recompute_rank update_tree get_state_from_tree
rank_assignment.FillGaps
rank_assignment.ShiftRanks
rank_assignment.FilterCountGroupedByKey: instance_count
rank_filter.RankFilter
rank_filter.MaxActiveWorldSize
rank_filter.ActiveWorldSizeDivisibleBy
rank_filter.WorldSizeDivisibleBy
sibling_monitor.Heartbeat: run shutdown
sibling_monitor.SiblingMonitor: run shutdown check_heartbeats terminate_unresponsive_ranks
state.Mode: INITIALIZED ACTIVE INACTIVE TERMINATED
state.State: rank world_size active_rank active_world_size initial_rank initial_world_size iteration mode
    fn_exception from_env set_distributed_vars advance freeze copy_from
state.freeze_dataclass
store.BarrierError
store.BarrierTimeout
store.BarrierOverflow
store.StoreMixin: ANY_RANK_INTERRUPTED ANY_RANK_COMPLETED INTERRUPTION_RECORDS INTERRUPTION_RECORDS_LOCK
    TERMINATED_RANKS INITIAL_RANK ACTIVE_RANK HEARTBEAT STATE KEY BARRIER_PREFIX STORE_PREFIX INITIAL_BARRIER
    COMPLETION_BARRIER ITERATION_BARRIER TERMINATION_BARRIER critical_ranks get_packed set_active_rank
    get_all_active_ranks set_initial_rank get_initial_ranks send_heartbeat send_state send_key get_states get_keys
    get_heartbeat get_all_heartbeats record_interrupted lock_interruption_records get_interruption_records
    wait_for_interrupted wait_for_completed record_completed record_terminated_ranks get_terminated_ranks barrier
    is_rank_at_reentrant_barrier reentrant_barrier initial_barrier completion_barrier iteration_barrier
    termination_barrier
store.TCPStore: TCP_STORE_HOST_RANK critical_ranks
store.PrefixStore
store.FileStore
terminate.Terminate
tools.inject_fault.Fault: GPU_ERROR GPU_SLEEP WORKLOAD_EXC ASYNC_EXC SIGNAL_EXC OS_ABORT LOCK_GIL SEGFAULT SIGINT
    SIGKILL SIGTERM SIGSTOP
tools.inject_fault.InjectedException
tools.inject_fault.register_fault
tools.inject_fault.dispatch_fault_injection
tools.inject_fault.async_raise
tools.inject_fault.termination_signal_handler
tools.inject_fault.workload_exception
tools.inject_fault.maybe_raise_workload_exception
tools.inject_fault.clear_workload_exception
tools.inject_fault.async_raise_exception
tools.inject_fault.raise_gpu_error
tools.inject_fault.gpu_sleep
tools.inject_fault.lock_gil
tools.inject_fault.segfault
tools.inject_fault.send_signal
tools.inject_fault.abort
tools.inject_fault.inject_fault
utils.torch_older_than
utils.format_exc
utils.log_exc
utils.log_exec
utils.find_nearest_handler
utils.Logging: initialize deinitialize
wrap.HealthCheckPassed
wrap.reserve_fn
wrap.Wrapper
wrap.CallWrapper: shutdown iteration ping atomic
"""

#: what 0.5 to 0.7 have besides; `rank_filter` went in 0.5, and `tools.inject_fault` moved beside the package in 0.6
LATER = """
abort.AbortPersistentCheckpointProcesses
abort.AbortTorchDistributed: collect_fr_trace
health_check.ChainedGPUHealthCheck
health_check.ChainedNVLHealthCheck
health_check.ChainedNicHealthCheck
monitor_process.Message: DISABLE_TIMEOUTS ENABLE_TIMEOUTS
monitor_process.MonitorProcess: disable_timeouts enable_timeouts
utils.format_rank_set
utils.format_rank_set_brief
utils.format_rank_set_verbose
wrap.CallWrapper: disable_hang_protection
"""

#: keyword arguments of its Wrapper, in all versions
OPTIONS = """
store_factory store_kwargs initialize abort finalize health_check rank_assignment rank_filter monitor_thread_interval
monitor_process_interval heartbeat_interval progress_watchdog_interval soft_timeout hard_timeout heartbeat_timeout
barrier_timeout completion_timeout last_call_wait termination_grace_time monitor_process_logfile enabled completion
terminate monitor_process_pidfile
"""
#: of which 0.2 has not these, and 0.5 to 0.7 have not that one
NOT_IN_0_2 = {"completion", "heartbeat_interval", "monitor_process_pidfile", "terminate"}
NOT_IN_0_7 = {"rank_filter"}

#: settings in the files of the launcher of 0.7
SETTINGS = """
workload_check_interval initial_rank_heartbeat_timeout rank_heartbeat_timeout rank_section_timeouts
rank_out_of_section_timeout node_health_check_interval safety_factor rank_termination_signal log_level
restart_check_interval enable_nic_monitor enable_nic_healthcheck enable_dist_storage_healthcheck
storage_healthcheck_path pci_topo_file link_down_path_template link_state_path_template skip_section_response segment
numa_bind_strict gpu_memory_reclaim_timeout gpu_memory_tolerance_mb gpu_memory_poll_interval check_remaining_processes
max_no_progress_cycles min_progress_iterations checkpoint_iteration_file install_exception_hook num_warmup_iterations
attribution_endpoint attribution_stop_action attribution_export_url cycle_info_dir segment_health_check_dir
"""

#: options of that launcher which torchrun has not, in one of their spellings
LAUNCHER = """
--ft-attribution-analysis-backend --ft-attribution-endpoint --ft-attribution-export-url
--ft-attribution-llm-api-key-file --ft-attribution-llm-base-url --ft-attribution-llm-model --ft-attribution-log-level
--ft-attribution-startup-timeout --ft-attribution-stop-action --ft-cfg-path --ft-check-remaining-processes
--ft-checkpoint-iteration-file --ft-cycle-info-dir --ft-cycle-info-job-id --ft-enable-dist-storage-healthcheck
--ft-enable-log-server --ft-enable-nic-healthcheck --ft-enable-nic-monitor --ft-gpu-memory-poll-interval
--ft-gpu-memory-reclaim-timeout --ft-gpu-memory-tolerance-mb --ft-ignore-missing-cfg
--ft-initial-rank-heartbeat-timeout --ft-install-exception-hook --ft-link-down-path-template
--ft-link-state-path-template --ft-log-aggregator-count --ft-log-leaf-max-queue-chunks --ft-log-level
--ft-log-server-graceful-shutdown-timeout --ft-log-server-log-prefix --ft-log-server-port --ft-max-no-progress-cycles
--ft-min-progress-iterations --ft-no-restart-exit-code --ft-node-health-check-endpoint --ft-node-health-check-interval
--ft-numa-bind-strict --ft-nvrx-logfile --ft-pci-topo-file --ft-per-cycle-applog-prefix --ft-rank-heartbeat-timeout
--ft-rank-out-of-section-timeout --ft-rank-section-timeouts --ft-rank-termination-signal --ft-rdzv-impl
--ft-restart-check-interval --ft-restart-policy --ft-safety-factor --ft-segment --ft-segment-health-check-dir
--ft-skip-section-response --ft-storage-health-check-path --ft-workload-check-interval --term-timeout
--workers-stop-timeout
"""


def names(text: str) -> Iterator[str]:
    """Dotted names, of classes and functions, and of the members of classes."""
    for line in text.strip().replace("\n    ", " ").splitlines():
        name, _, members = line.partition(": ")
        yield name
        yield from (f"{name}.{member}" for member in members.split())


ALL = sorted({*names(OLDER), *names(NEWER), *names(LATER)})
