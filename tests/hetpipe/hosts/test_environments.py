"""The variables of each starter, as they were seen in processes that it had started."""

import socket
from collections.abc import Mapping

import pytest

from cost_model.cluster import Cluster
from cost_model.cluster_file import cluster_from_data
from cost_model.errors import InputError
from hetpipe.hosts.derived_rendezvous import check_hosts, meeting_of, node_of
from hetpipe.hosts.environments import Placed, Starter, placed_by
from hetpipe.hosts.host_lists import counts_of_list, hosts_of_list
from hetpipe.hosts.rendezvous import own_node

TORCHRUN = {  # torch 2.13, the second of two agents, its second process
    "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "gpu01", "MASTER_PORT": "43659",
    "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1", "ROLE_RANK": "3", "ROLE_NAME": "default",
    "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "4",
}  # fmt: skip
SLURM = {  # 22.05.8, srun --ntasks-per-node=2 in a batch script, the third of six tasks
    "SLURMD_NODENAME": "gpu02", "SLURM_CLUSTER_NAME": "test", "SLURM_CPUS_ON_NODE": "4",
    "SLURM_DISTRIBUTION": "block", "SLURM_GTIDS": "2,3", "SLURM_JOBID": "200505",
    "SLURM_JOB_CPUS_PER_NODE": "4(x3)", "SLURM_JOB_ID": "200505", "SLURM_JOB_NODELIST": "gpu[01-03]",
    "SLURM_JOB_NUM_NODES": "3", "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.10", "SLURM_LOCALID": "0",
    "SLURM_NNODES": "3", "SLURM_NODEID": "1", "SLURM_NODELIST": "gpu[01-03]", "SLURM_NODE_ALIASES": "(null)",
    "SLURM_NPROCS": "6", "SLURM_NTASKS": "6", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "2",
    "SLURM_STEPID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_LAUNCHER_PORT": "45023",
    "SLURM_STEP_NODELIST": "gpu[01-03]", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_SUBMIT_HOST": "gpu01", "SLURM_TASKS_PER_NODE": "2(x3)",
    "SLURM_TASK_PID": "30195", "SLURM_TOPOLOGY_ADDR": "gpu02", "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
}  # fmt: skip
THREE_NAMES = ("gpu01", "gpu02", "gpu03")
OPEN_MPI = {  # 5.0.11, mpirun --map-by ppr:1:node on two hosts
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_NODE_RANK": "0", "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-gpu01-22012@1", "PMIX_RANK": "1", "PMIX_HOSTNAME": "gpu02",
}  # fmt: skip
PYTORCHJOB = {  # training-operator 1.8, nprocPerNode 4: WORLD_SIZE counts those too
    "KUBERNETES_SERVICE_HOST": "10.96.0.1", "PYTHONUNBUFFERED": "1", "MASTER_ADDR": "bert-master-0",
    "MASTER_PORT": "23456", "PET_MASTER_ADDR": "bert-master-0", "PET_MASTER_PORT": "23456",
    "WORLD_SIZE": "8", "RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_NNODES": "2",
}  # fmt: skip
OLD_PYTORCHJOB = {  # training-operator 1.3, and the elastic range of later ones
    "KUBERNETES_SERVICE_HOST": "10.96.0.1", "PYTHONUNBUFFERED": "0", "MASTER_ADDR": "bert-master-0",
    "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "0", "PET_NNODES": "1:3",
}  # fmt: skip
TRAINJOB = {  # Kubeflow Trainer 2
    "KUBERNETES_SERVICE_HOST": "10.96.0.1", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "bert-node-0-0.bert", "PET_MASTER_PORT": "29500",
}  # fmt: skip
RAY = {  # 2.60, the second of two workers of one host
    "RAY_RAYLET_PID": "23027", "RAY_CLIENT_MODE": "0", "RAY_JOB_ID": "01000000", "MASTER_ADDR": "192.0.2.2",
    "MASTER_PORT": "53303", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "RANK": "1",
    "WORLD_SIZE": "2",
}  # fmt: skip


def placed(environment: Mapping[str, str], **changed: str) -> Placed:
    found = placed_by({**environment, **changed})
    assert found is not None
    return found


def facts(found: Placed) -> tuple[Starter, int, int, int | None, str | None, int | None]:
    return found.starter, found.local, found.num_local, found.num_hosts, found.leader, found.index


def test_torchrun():
    found = placed(TORCHRUN)
    assert facts(found) == (Starter.TORCHRUN, 1, 2, 2, "gpu01", 1)
    assert found.port != 43659  # there its agent listens
    again = placed(TORCHRUN, TORCHELASTIC_RESTART_COUNT="1")
    assert (found.port, found.job) != (again.port, again.job)


def test_slurm():
    found = placed(SLURM)
    assert facts(found) == (Starter.SLURM, 0, 2, 3, "gpu01", 1)
    assert (found.hosts, found.host) == (THREE_NAMES, "gpu02")
    other = placed(SLURM, SLURM_PROCID="0", SLURM_NODEID="0", SLURMD_NODENAME="gpu01")
    assert other.index == 0
    assert (other.port, other.job) == (found.port, found.job)
    assert other.job_here != found.job_here
    assert placed(SLURM, SLURM_STEP_ID="1").port != found.port


def test_a_batch_script_that_srun_has_not_started_is_on_its_own():
    assert placed_by({name: value for name, value in SLURM.items() if "STEP" not in name}) is None


def test_open_mpi():
    found = placed(OPEN_MPI)
    assert facts(found) == (Starter.OPEN_MPI, 0, 1, None, None, None)  # another host may have several
    assert found.are_several
    assert not placed(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="2").are_several


def test_open_mpi_4_names_its_job_otherwise():
    old = {name: value for name, value in OPEN_MPI.items() if not name.startswith("PMIX")}
    assert placed(old, OMPI_MCA_ess_base_jobid="2785804289").job == "2785804289"


def test_mpirun_in_a_job_of_slurm_is_mpirun():
    assert placed({**SLURM, **OPEN_MPI}).starter is Starter.OPEN_MPI


def test_torchrun_in_a_pod_or_a_job_is_torchrun():
    assert placed({**SLURM, **PYTORCHJOB, **TORCHRUN}).starter is Starter.TORCHRUN


def test_pods_of_kubeflow():
    assert facts(placed(PYTORCHJOB)) == (Starter.KUBERNETES, 0, 1, 2, "bert-master-0", 1)
    assert placed(PYTORCHJOB).port == 23456
    assert facts(placed(OLD_PYTORCHJOB)) == (Starter.KUBERNETES, 0, 1, 3, "bert-master-0", 0)
    assert facts(placed(TRAINJOB)) == (Starter.KUBERNETES, 0, 1, 2, "bert-node-0-0.bert", 0)


def test_ray_train():
    assert facts(placed(RAY)) == (Starter.RAY, 1, 2, 1, "192.0.2.2", 0)
    assert placed(RAY, WORLD_SIZE="4").num_hosts is None
    assert placed(RAY).port != 53303  # there torch's process group of Ray meets


def test_no_starter():
    assert placed_by({}) is None
    assert placed_by({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}) is None


@pytest.mark.parametrize(
    ("environment", "changed", "said"),
    [
        (TORCHRUN, {"RANK": "4"}, r"RANK is 4, and WORLD_SIZE is 4"),
        (TORCHRUN, {"LOCAL_RANK": "2"}, r"LOCAL_RANK is 2, and LOCAL_WORLD_SIZE is 2"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "9"}, r"rank 3 of 4, 1 of 9 on this host"),
        (TORCHRUN, {"GROUP_RANK": "one"}, r"GROUP_RANK is 'one', which is no whole number"),
        (TORCHRUN, {"GROUP_RANK": "٣"}, r"which is no whole number"),
        (TORCHRUN, {"MASTER_ADDR": ""}, r"MASTER_ADDR is not set"),
        (SLURM, {"SLURM_NODEID": "3"}, r"SLURM_NODEID is 3"),
        (SLURM, {"SLURMD_NODENAME": "gpu01"}, r"node 1 is gpu02, and here is gpu01"),
        (SLURM, {"SLURM_LOCALID": "2"}, r"SLURM_LOCALID 2 of node 1, 6 tasks"),
        (SLURM, {"SLURM_STEP_NODELIST": "gpu[01-04]"}, r"on gpu01, gpu02, gpu03, gpu04"),
        (SLURM, {"SLURM_STEP_NODELIST": "gpu["}, r"is no list of hosts"),
        (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "1"}, r"OMPI_COMM_WORLD_RANK is 1"),
        (PYTORCHJOB, {"PET_NODE_RANK": "2"}, r"PET_NODE_RANK is 2, and PET_NNODES is 2"),
        (PYTORCHJOB, {"MASTER_PORT": "70000"}, r"70000, which is no port"),
        (RAY, {"WORLD_SIZE": "1"}, r"RANK is 1, and WORLD_SIZE is 1"),
    ],
)
def test_variables_that_contradict_each_other_are_one_line(
    environment: dict[str, str], changed: dict[str, str], said: str
):
    with pytest.raises(InputError, match=f"{said}.*give --rendezvous on each host") as refused:
        placed_by({**environment, **changed})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu01", ["gpu01"]),
        ("gpu[08-11,3]", ["gpu08", "gpu09", "gpu10", "gpu11", "gpu3"]),
        ("a,b[1-2].x,c", ["a", "b1.x", "b2.x", "c"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]):
    assert list(hosts_of_list(text)) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpu[",
        "gpu]1[",
        "gpu[2-1]",
        "gpu[1-99999]",
        "r[1-99]n[1-99]",
        "a,,b",
        "gpu[a]",
        "g" * 200_000,
        "gpu[1-2-3]",
    ],
)
def test_what_is_no_list_of_hosts_is_refused(text: str):
    with pytest.raises(InputError, match="is no list of hosts"):
        hosts_of_list(text)


def test_lists_of_counts():
    assert counts_of_list("4(x2),1") == (4, 4, 1)
    for text in ("", "4(x9999)", "4(x", "four"):
        with pytest.raises(InputError, match="is no list of hosts or counts"):
            counts_of_list(text)


def cluster(*hosts: tuple[str, str | None]) -> Cluster:
    nodes = [
        {
            "name": name,
            "devices": [{"kind": "emulated", "memory": "1 GiB"}],
            **({"host": host} if host else {}),
        }
        for name, host in hosts
    ]
    network = {"bandwidth": "1 Gbit/s", "latency": "1 ms"}
    return cluster_from_data({"network": network, "nodes": nodes}, "test")


TWO = cluster(("gpu01", "127.0.0.5"), ("gpu02", "127.0.0.6"))
THREE = cluster(("gpu01", "127.0.0.5"), ("two", "gpu02"), ("gpu03", None))


def silent(text: str) -> None:
    raise AssertionError(text)


def test_hosts_are_nodes_by_name_or_address():
    for host in ("gpu01", "gpu01.example.org", "127.0.0.5"):
        found = node_of(TWO, host)
        assert found is not None
        assert found.name == "gpu01"
    assert node_of(TWO, "127.0.0.7") is None


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (
            cluster(("gpu01", None), ("other", None)),
            r"on gpu02, gpu03, and the cluster file has gpu01, other",
        ),
        (
            cluster(*((name, None) for name in (*THREE_NAMES, "gpu04"))),
            r"on gpu01, gpu02, gpu03, and not on gpu04",
        ),
    ],
)
def test_a_cluster_file_of_other_hosts_is_refused(nodes: Cluster, said: str):
    check_hosts(placed(SLURM), THREE)
    with pytest.raises(InputError, match=f"SLURM started this {said}.*--exclude"):
        check_hosts(placed(SLURM), nodes)


def test_a_cluster_file_of_another_number_of_hosts_is_refused():
    check_hosts(placed(PYTORCHJOB), TWO)
    with pytest.raises(InputError, match=r"Kubernetes started this on 3 hosts, and the cluster file has 2 "):
        check_hosts(placed(OLD_PYTORCHJOB), TWO)
    with pytest.raises(InputError, match=r"on several hosts, and the cluster file has 1 \(one\)"):
        check_hosts(placed(RAY, WORLD_SIZE="4"), cluster(("one", None)))


def test_where_the_hosts_meet():
    assert meeting_of(placed(SLURM), THREE, 1.0, silent) == ("gpu01", placed(SLURM).port)
    assert meeting_of(placed(OPEN_MPI), TWO, 1.0, silent)[0] == "gpu01"  # nobody says where rank 0 is
    assert meeting_of(placed(RAY), TWO, 1.0, silent)[0] == "192.0.2.2"
    here = placed(OLD_PYTORCHJOB, MASTER_ADDR="localhost")  # as its master is told
    assert meeting_of(here, TWO, 1.0, silent) == (socket.gethostname(), 23456)
    with pytest.raises(InputError, match=r"gpu01, which leads, is a name that this host does not know"):
        meeting_of(placed(SLURM), cluster(("gpu01", None), ("gpu02", None)), 1.0, silent)


def test_the_name_of_a_pod_is_waited_for():
    told: list[str] = []
    with pytest.raises(InputError, match="a name that this host does not know"):
        meeting_of(placed(PYTORCHJOB, MASTER_ADDR="bert-master-0.invalid"), TWO, 0.01, told.append)
    assert told == ["waiting for bert-master-0.invalid, which leads, to have an address"]


def test_a_host_finds_its_node_by_its_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("socket.gethostname", lambda: "called-otherwise")
    monkeypatch.setattr("hetpipe.hosts.rendezvous.is_own", lambda number: number in ("10.0.0.2", "127.0.0.1"))
    assert own_node(cluster(("big", "10.0.0.1"), ("small", "10.0.0.2")), None) == "small"
    with pytest.raises(InputError, match="give --node"):  # loopback is every host's
        own_node(cluster(("big", "10.0.0.1"), ("small", "127.0.0.1")), None)
