"""Who has started this process, and where it has put it, as the variables of its environment say.

What each sets is in its documents: torch.distributed.run ("Environment Variables"), srun(1) ("OUTPUT
ENVIRONMENT VARIABLES"), Open MPI ("Environment variables set for MPI applications"), Kubeflow's
training-operator (pkg/controller.v1/pytorch/envvar.go) and trainer (PET_*), Ray (ray/train/torch/config.py).
Ranks are never taken as an order of devices: the variables say which processes share a host, and who leads.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cost_model.errors import InputError
from hetpipe.hosts.host_lists import counts_of_list, hosts_of_list

Environment = Mapping[str, str]

OF_RANKS = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip
"""What is said of ranks that others have numbered: a launcher that starts ranks of its own looks away."""
FIRST_PORT, NUM_PORTS = 10_000, 20_000
"""Ports made of a job's number: below those that Linux gives to connections (32768)."""
_REMEDY = "unset what is left of another job, or give --rendezvous on each host"


class Starter(StrEnum):
    """Who starts processes on hosts."""

    TORCHRUN = "torchrun"
    RAY = "Ray Train"
    OPEN_MPI = "Open MPI"
    SLURM = "SLURM"
    KUBERNETES = "Kubernetes"


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a starter has put this process.

    local: counted among the num_local processes of the same start on this host. num_hosts: None where the
    starter does not say it, and there are several. hosts: their names, () where it does not say them; host:
    this one's, "" where it does not say it.
    leader: the host that leads, by name or address; None where it does not say one. index: of this host, None
    where it does not say it; the first leads. port: at which the hosts meet. job: the same text for all
    processes of one start, and for no other's.
    """

    starter: Starter
    local: int
    num_local: int
    num_hosts: int | None
    port: int
    job: str
    leader: str | None = None
    index: int | None = None
    hosts: tuple[str, ...] = ()
    host: str = ""

    @property
    def are_several(self) -> bool:
        """Return whether there are several hosts."""
        return self.num_hosts != 1

    @property
    def job_here(self) -> str:
        """Return the same text for all processes of one start on this host."""
        return f"{self.starter}\0{self.job}\0{self.index}"


def placed_by(environment: Environment) -> Placed | None:
    """Return where the starter of this process has put it; None where it has none that is known.

    Raises: InputError if the variables contradict each other.
    """
    for starter, (mark, read) in _KNOWN.items():
        if mark(environment):
            return read(_Variables(starter, environment))
    return None


def port_of(*job: str) -> int:
    """Return a port that all hosts of a job make of its number, others most likely another.

    >>> FIRST_PORT <= port_of("123", "0") < FIRST_PORT + NUM_PORTS
    True
    """
    digest = hashlib.sha256("\0".join(job).encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:8], "big") % NUM_PORTS


@dataclass(frozen=True, slots=True)
class _Variables:
    """The variables of a starter, which are to be whole numbers, and to agree."""

    starter: Starter
    environment: Environment

    def text(self, *names: str, default: str | None = None) -> str:
        """Return the first variable that is set; its default where none is."""
        for name in names:
            if value := self.environment.get(name, ""):
                return value
        if default is None:
            raise InputError(f"{self.starter} is here, and {names[0]} is not set; {_REMEDY}")
        return default

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the first variable that is set, a number of at least 0."""
        text = self.text(*names, default=None if default is None else str(default))
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            name = next(name for name in names if self.environment.get(name))
            raise InputError(f"{name} is {text!r}, which is no whole number of {self.starter}; {_REMEDY}")
        return int(text)

    def pair(self, index: tuple[str, ...], count: tuple[str, ...]) -> tuple[int, int]:
        """Return an index, and the count that it is below."""
        one, of = self.number(*index), self.number(*count)
        if one >= of:
            raise InputError(
                f"{self.starter} contradicts itself: {index[0]} is {one}, and {count[0]} is {of}; {_REMEDY}"
            )
        return one, of

    def port(self, *names: str) -> int:
        """Return the port that a variable names."""
        number = self.number(*names)
        if not 0 < number < 2**16:
            raise InputError(f"{names[0]} is {number}, which is no port; {_REMEDY}")
        return number


def _torchrun(variables: _Variables) -> Placed:
    """Read the variables of torchrun.

    NOTE: its agent listens at MASTER_PORT already.
    """
    rank, size = variables.pair(("RANK",), ("WORLD_SIZE",))
    local, num_local = variables.pair(("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
    node, hosts = variables.pair(("GROUP_RANK",), ("GROUP_WORLD_SIZE",))
    _check_counts(variables, rank, local, (size, num_local, hosts))
    leader, meeting = variables.text("MASTER_ADDR"), variables.text("MASTER_PORT")
    job = (variables.text("TORCHELASTIC_RUN_ID"), leader, meeting)
    again = variables.text("TORCHELASTIC_RESTART_COUNT", default="0")
    return Placed(
        Starter.TORCHRUN, local, num_local, hosts, port_of(*job, again), "\0".join((*job, again)),
        leader, node,
    )  # fmt: skip


def _ray(variables: _Variables) -> Placed:
    """Read what Ray Train says to its workers.

    NOTE: the first worker listens at MASTER_PORT already, for torch's process group.
    """
    rank, size = variables.pair(("RANK",), ("WORLD_SIZE",))
    local, num_local = variables.pair(("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
    hosts = 1 if num_local == size else None
    _check_counts(variables, rank, local, (size, num_local, hosts or 1))
    leader, meeting = variables.text("MASTER_ADDR"), variables.text("MASTER_PORT")
    node = variables.number("NODE_RANK")
    job = (leader, meeting)
    return Placed(Starter.RAY, local, num_local, hosts, port_of(*job), "\0".join(job), leader, node)


def _open_mpi(variables: _Variables) -> Placed:
    """Read what mpirun says; not who the other hosts are, nor how many: each may have another number."""
    rank, size = variables.pair(("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",))
    local, num_local = variables.pair(("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_LOCAL_SIZE",))
    _check_counts(variables, rank, local, (size, num_local, 1))
    hosts = 1 if num_local == size else None
    job = variables.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return Placed(Starter.OPEN_MPI, local, num_local, hosts, port_of(job), job)


def _slurm(variables: _Variables) -> Placed:
    """Read what srun says of its step: a batch script that srun has not started is on one host alone."""
    rank, size = variables.pair(("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    node, hosts = variables.pair(("SLURM_NODEID",), ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
    names = hosts_of_list(variables.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    counts = counts_of_list(variables.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    local = variables.number("SLURM_LOCALID")
    if not len(names) == len(counts) == hosts or sum(counts) != size or local >= counts[node]:
        raise InputError(
            f"SLURM contradicts itself: SLURM_LOCALID {local} of node {node}, {size} tasks, as "
            f"{','.join(map(str, counts))} on {', '.join(names)}; {_REMEDY}"
        )
    own = variables.text("SLURMD_NODENAME", default=names[node])
    if own != names[node]:
        raise InputError(
            f"SLURM contradicts itself: node {node} is {names[node]}, and here is {own}; {_REMEDY}"
        )
    _check_counts(variables, rank, local, (size, counts[node], hosts))
    again = variables.text("SLURM_RESTART_COUNT", default="0")
    job = (variables.text("SLURM_JOB_ID"), variables.text("SLURM_STEP_ID"), again)
    return Placed(
        Starter.SLURM, local, counts[node], hosts, port_of(*job), "\0".join(job),
        names[0], node, names, names[node],
    )  # fmt: skip


def _kubernetes(variables: _Variables) -> Placed:
    """Read what Kubeflow says to each pod, a host of its own: of a PyTorchJob, or a TrainJob (PET_*).

    NOTE: WORLD_SIZE counts pods, in newer versions those times the processes of each; PET_NNODES may be a
    range, as 2:4.
    """
    if variables.environment.get("PET_NNODES", "").isdecimal():
        node, hosts = variables.pair(("PET_NODE_RANK", "RANK"), ("PET_NNODES",))
    else:
        node, hosts = variables.pair(("RANK",), ("WORLD_SIZE",))
    leader = variables.text("MASTER_ADDR", "PET_MASTER_ADDR")
    port = variables.port("MASTER_PORT", "PET_MASTER_PORT")
    return Placed(Starter.KUBERNETES, 0, 1, hosts, port, f"{leader}\0{port}", leader, node)


def _check_counts(variables: _Variables, rank: int, local: int, counts: tuple[int, int, int]) -> None:
    """Check that a process is one of its host's, and its host one of all.

    counts: of all processes, of those here, and of hosts at least.
    """
    size, num_local, hosts = counts
    if local > rank or num_local + hosts - 1 > size:
        raise InputError(
            f"{variables.starter} contradicts itself: rank {rank} of {size}, {local} of {num_local} on this "
            f"host, of at least {hosts}; {_REMEDY}"
        )


def _sets(*names: str) -> Callable[[Environment], bool]:
    return lambda environment: all(environment.get(name) for name in names)


def _is_pod(environment: Environment) -> bool:
    """Return whether this is a pod of Kubeflow, in which nobody has numbered local processes."""
    if environment.get("LOCAL_RANK") or not environment.get("KUBERNETES_SERVICE_HOST"):
        return False
    if _sets("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")(environment):
        return True
    return _sets("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")(environment)


_KNOWN: dict[Starter, tuple[Callable[[Environment], bool], Callable[[_Variables], Placed]]] = {
    Starter.TORCHRUN: (_sets("TORCHELASTIC_RUN_ID", "RANK"), _torchrun),
    Starter.RAY: (_sets("RAY_JOB_ID", "NODE_RANK", "LOCAL_RANK"), _ray),
    Starter.OPEN_MPI: (_sets("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"), _open_mpi),
    Starter.SLURM: (_sets("SLURM_STEP_ID", "SLURM_PROCID"), _slurm),
    Starter.KUBERNETES: (_is_pod, _kubernetes),
}
"""The innermost first: mpirun works by srun under SLURM, and torchrun under any of them."""
