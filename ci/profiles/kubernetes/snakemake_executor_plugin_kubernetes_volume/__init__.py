"""Snakemake's Kubernetes executor for clusters where a persistent volume holds the checkout and the runs.

The executor it builds on assumes that nothing is shared and moves every file through object storage. With a volume
mounted at the same path in every pod, files are shared as they are on SLURM. Only that assumption and the folder in
which a pod works are changed here.
"""

import shlex
from dataclasses import replace
from pathlib import Path

import snakemake_executor_plugin_kubernetes as base

ExecutorSettings = base.ExecutorSettings
common_settings = replace(base.common_settings, implies_no_shared_fs=False, job_deploy_sources=False, auto_deploy_default_storage_provider=False)


class Executor(base.Executor):
    def get_job_exec_prefix(self, job):
        return f"cd {shlex.quote(str(Path.cwd()))}"
