"""A Slurm of several nodes on this machine, for tests: its own daemons, each node a host of laminar_hpc/launch/hosts.py.

The first host is the login node, with the controller; the others are the compute nodes. Ports and host names are theirs alone,
files, memory and process ids are this machine's, so that the run directory is on a file system that all of them see.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from laminar_command import wait_until

from laminar_hpc.errors import ConfigError
from laminar_hpc.launch import hosts
from laminar_hpc.launch.hosts import Hosts

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
UP_S = 60.0

_CONF = """
ClusterName=laminar
SlurmctldHost={controller}({address})
AuthType=auth/munge
AuthInfo=socket={state}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={state}
SlurmdSpoolDir={state}/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
ReturnToService=2
SlurmdTimeout=30
KillWait=5
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here; "" where there can."""
    try:
        hosts.check()
    except ConfigError as error:
        return str(error)
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"no {', '.join(absent)} on PATH; Debian's slurm-wlm and munge have them" if absent else ""


class SlurmCluster:
    """`nodes` compute nodes of `cpus` CPUs each; a context manager, at whose end none of its processes is left.

    `directory` is for its config and its logs.
    """

    def __init__(self, directory: Path, nodes: int, cpus: int) -> None:
        self.directory = directory
        self._state = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path has at most 108 characters
        self._cpus = cpus
        self._hosts = Hosts(nodes + 1, "1gbit")
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def nodes(self) -> list[str]:
        """The names of the compute nodes."""
        return self._hosts.names[1:]

    def __enter__(self) -> SlurmCluster:
        self._hosts.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._hosts.remove()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self._state, ignore_errors=True)

    def login(self, *command: str) -> str:
        """What a command on the login node prints; AssertionError where it fails."""
        done = subprocess.run(
            self._on(0, *command), env=self._environment(), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def kill_node(self, node: str) -> None:
        """Kill every process of a compute node at once, its slurmd included, as a lost node does."""
        pids = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True, check=True).stdout.split()
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)

    def start_node(self, node: str) -> None:
        """Start the slurmd of a compute node."""
        self._daemon(*self._on(self._hosts.names.index(node), "slurmd", "-D", "-N", node))

    def state(self, node: str) -> str:
        """What the controller says of a node: "idle", "allocated", "down*", ..."""
        return self.login("sinfo", "-h", "-N", "-n", node, "-o", "%T")

    def _start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        key = self._state / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        lines = [
            f"NodeName={name} NodeAddr={self._hosts.address(index + 1)} CPUs={self._cpus} RealMemory=4000"
            for index, name in enumerate(self.nodes)
        ]
        (self.directory / "slurm.conf").write_text(
            _CONF.format(
                controller=self._hosts.names[0],
                address=self._hosts.address(0),
                directory=self.directory,
                state=self._state,
                nodes="\n".join(lines),
            )
        )
        at = {name: f"--{name}-file={self.directory}/munged.{name}" for name in ("pid", "log", "seed")}
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self._socket}", *at.values())
        wait_until(self._socket.exists, UP_S, f"munged; see {self.directory}")
        self._daemon(*self._on(0, "slurmctld", "-D", "-i"))
        for name in self.nodes:
            (self._state / name).mkdir()
            self.start_node(name)
        wait_until(self._all_idle, UP_S, f"all nodes idle; see {self.directory}")

    @property
    def _socket(self) -> Path:
        return self._state / "munge.socket"

    def _on(self, host: int, *command: str) -> list[str]:
        """The command line that runs a command on a host, under that host's name."""
        name = self._hosts.names[host]
        enter = [
            "nsenter",
            f"--net=/run/netns/{name}",
            "unshare",
            "--uts",
            "--mount",
        ]  # `ip netns exec` would hide cgroups
        rename = f'mount --bind /etc/netns/{name}/hosts /etc/hosts && hostname {name} && exec "$@"'
        return [*enter, "sh", "-c", rename, "sh", *command]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.directory / "slurm.conf"), "PATH": _path()}

    def _daemon(self, *command: str) -> None:
        with (self.directory / "daemons.log").open("ab") as log:
            self._daemons.append(subprocess.Popen(command, env=self._environment(), stdout=log, stderr=log))

    def _all_idle(self) -> bool:
        line = self._on(0, "sinfo", "-h", "-t", "idle", "-o", "%D")
        done = subprocess.run(line, env=self._environment(), capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip() == str(len(self.nodes))


def _path() -> str:
    """PATH with the folders of system daemons, which a user's may lack."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
