"""What nvidia-resiliency-ext's ``ft_launcher`` takes and this launcher does not need, and what stands for it here.

Its command lines and files go on working: what is in this table is taken and does nothing, and a line says so. What
both launchers have is in `ft_config` and `arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FLAGS", "OPTIONS", "SETTINGS"]

_ADAPTERS = "health_check=ChainedNicHealthCheck() of the Wrapper, which finds adapters and links in /sys"
_CHECK = "a health_check of the Wrapper, a function of yours"
_REPEATS = "max_repeats of the Wrapper, which counts failures without a ping() in between"
_LOGS = "--log-dir with --redirects or --tee: a file for each worker"
_REPORT = "`inprocess report` on the run directory says what failed"
_GRACE = "--shutdown-timeout"
_NEW_PROCESS = "nothing: a new worker starts once the one before has ended"

#: of its files; each is an option, too, `--ft-` in front
SETTINGS: Mapping[str, str] = {
    "node_health_check_interval": _CHECK,
    "log_level": "the variable LOGLEVEL",
    "restart_check_interval": "nothing: the launcher is told of a restart",
    "enable_nic_monitor": _ADAPTERS,
    "enable_nic_healthcheck": _ADAPTERS,
    "pci_topo_file": _ADAPTERS,
    "link_down_path_template": _ADAPTERS,
    "link_state_path_template": _ADAPTERS,
    "enable_dist_storage_healthcheck": _CHECK,
    "storage_healthcheck_path": _CHECK,
    "skip_section_response": "nothing: ping() and sections never wait",
    "use_infra_group_rank": "nothing: GROUP_RANK and SLURM_PROCID count",
    "segment": "rank_assignment=Tree([...]) of the Wrapper, with a Layer for the domains",
    "numa_bind_strict": "--numa-binding of torchrun",
    "gpu_memory_reclaim_timeout": _NEW_PROCESS,
    "gpu_memory_tolerance_mb": _NEW_PROCESS,
    "gpu_memory_poll_interval": _NEW_PROCESS,
    "check_remaining_processes": "nothing: a worker's process group is ended with it",
    "max_no_progress_cycles": _REPEATS,
    "min_progress_iterations": _REPEATS,
    "checkpoint_iteration_file": _REPEATS,
    "install_exception_hook": "nothing: an exception of a wrapped function restarts it",
    "num_warmup_iterations": "timeouts.calculate() of inprocess.monitored(), called after the first steps",
    "attribution_endpoint": _REPORT,
    "attribution_stop_action": _REPEATS,
    "attribution_export_url": _REPORT,
    "cycle_info_dir": "--run-dir",
    "segment_health_check_dir": _CHECK,
}

#: of its command line alone, without the dashes in front
OPTIONS: Mapping[str, str] = {
    "term-timeout": _GRACE,
    "workers-stop-timeout": _GRACE,
    "ft-node-health-check-endpoint": _CHECK,
    "ft-storage-health-check-path": _CHECK,
    "ft-rdzv-impl": "--rdzv-backend",
    "ft-ignore-missing-cfg": "nothing: every setting has a default",
    "ft-no-restart-exit-code": "nothing: a job that failed ends with 1",
    "ft-attribution-startup-timeout": _REPORT,
    "ft-attribution-compute-timeout": _REPORT,
    "ft-attribution-llm-api-key-file": _REPORT,
    "ft-attribution-llm-base-url": _REPORT,
    "ft-attribution-llm-model": _REPORT,
    "ft-attribution-analysis-backend": _REPORT,
    "ft-attribution-log-level": _REPORT,
    "ft-cycle-info-job-id": "--run-dir",
    "ft-per-cycle-applog-prefix": _LOGS,
    "ft-nvrx-logfile": _LOGS,
    "ft-enable-log-server": _LOGS,
    "ft-log-server-port": _LOGS,
    "ft-log-aggregator-count": _LOGS,
    "ft-log-leaf-max-queue-chunks": _LOGS,
    "ft-log-server-log-prefix": _LOGS,
    "ft-log-server-graceful-shutdown-timeout": _LOGS,
}
#: those of them that have no value
FLAGS = frozenset({"ft-ignore-missing-cfg"})
