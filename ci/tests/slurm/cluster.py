"""A SLURM of one node on this machine: its own munge key, ports and folders, ended by process id."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

DAEMONS = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm"}


def missing() -> list[str]:
    "Packages whose daemons aren't installed."
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    return sorted({package for daemon, package in DAEMONS.items() if not shutil.which(daemon, path=path)})


def install() -> str | None:
    "Install what is missing; the reason when it can't be had."
    if not missing(): return None
    if os.geteuid() or not shutil.which("apt-get"): return f"{', '.join(missing())} not installed; installing needs root and apt-get"
    # Debian would start the packages' own services; a policy that denies keeps it from that.
    policy = Path("/usr/sbin/policy-rc.d")
    made = not policy.exists()
    if made:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *missing()]):
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, timeout=600, check=False)
            if done.returncode: return f"{' '.join(command)} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
    finally:
        if made: policy.unlink()
    return f"{', '.join(missing())} still missing after apt-get" if missing() else None


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Cluster:
    "Starts munged, slurmctld and slurmd in a folder; `env` makes SLURM's commands use them."

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, []
        self.host = socket.gethostname().split(".")[0]
        for name in ("munge", "state", "spool", "log", "bin"): (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "munge").chmod(0o711)
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', '')}"}

    def __enter__(self) -> Self:
        try:
            self._munge()
            self._configure()
            for daemon in ("slurmctld", "slurmd"): self._start([daemon, "-D"], daemon)
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for process in reversed(self.processes):
            process.terminate()
            try: process.wait(15)
            except subprocess.TimeoutExpired: process.kill()

    def _start(self, command: list[str], name: str) -> None:
        path = shutil.which(command[0], path=os.environ.get("PATH", "") + ":/usr/sbin")
        with open(self.folder / "log" / f"{name}.out", "w") as log:  # a session of its own: an interrupt is meant for the tests
            self.processes.append(subprocess.Popen([path, *command[1:]], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | self.env, start_new_session=True))

    def _munge(self) -> None:
        key, self.socket = self.folder / "munge" / "key", self.folder / "munge" / "socket"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self._start(["munged", "-F", "-f", f"--key-file={key}", f"--socket={self.socket}", f"--pid-file={self.folder}/munge/pid", f"--log-file={self.folder}/log/munged",
                     f"--seed-file={self.folder}/munge/seed"], "munged")
        self._until(self.socket.exists, "munged to listen")

    def _configure(self) -> None:
        # Snakemake drops SLURM_CONF before it calls srun inside a job: real clusters have their configuration in /etc
        (self.folder / "bin" / "srun").write_text(f"#!/bin/sh\nexport SLURM_CONF={self.folder}/slurm.conf\nexec {shutil.which('srun')} \"$@\"\n")
        (self.folder / "bin" / "srun").chmod(0o755)
        cores = os.cpu_count() or 1
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
        user = "root" if os.geteuid() == 0 else os.environ["USER"]
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (self.folder / "slurm.conf").write_text(f"""ClusterName=test
SlurmctldHost={self.host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={_free_port()}
SlurmdPort={_free_port()}
AuthType=auth/munge
AuthInfo=socket={self.socket}
CredType=cred/munge
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd.pid
SlurmctldLogFile={self.folder}/log/slurmctld
SlurmdLogFile={self.folder}/log/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MinJobAge=300
NodeName={self.host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory={memory - 500} State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")

    def command(self, *arguments: str) -> str:
        return subprocess.run(arguments, env=os.environ | self.env, capture_output=True, text=True, timeout=60, check=False).stdout

    def _wait(self) -> None:
        self._until(lambda: self.command("sinfo", "-h", "-o", "%t").strip() == "idle", "the node to be idle")

    def _until(self, condition, what: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            dead = [p.args[0] for p in self.processes if p.poll() is not None]
            if dead or time.monotonic() > end:
                logs = "\n".join(f"{f.name}: {f.read_text(errors='replace')[-1500:]}" for f in sorted((self.folder / "log").iterdir()))
                raise RuntimeError(f"{'ended: ' + str(dead) if dead else 'waited in vain for ' + what}\n{logs}")
            time.sleep(0.2)
