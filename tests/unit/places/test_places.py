"""A process's place, from the variables of what started it: recorded from Open MPI 4.1.4, and as Slurm's and MPICH's manuals have them."""

import pytest

from smpc.errors import ConfigError
from smpc.places import Launch, Place

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",  # a position in the node, not the node's
    "PMIX_NAMESPACE": "584908801",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCH = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
MASTER = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"MASTER_ADDR": "host0"}, None),
        (OPEN_MPI, (1, 2, 1, 2)),
        (HYDRA, (1, 4, 1, 2)),
        ({"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4"}, (3, 4, None, None)),
        (SLURM, (9, 11, 1, 3)),
        ({**SLURM, "SLURM_NODEID": "1"}, (9, 11, 1, 4)),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "10"}, (9, 10, 1, 3)),  # a step has fewer tasks than its job
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", **MASTER}, (1, 2, 1, None)),
        # A batch script, and an allocation's shell: one process.
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "77"}, None),
        # What is started inside of a task counts.
        ({**SLURM, **OPEN_MPI}, (1, 2, 1, 2)),
        ({**SLURM, **TORCH, "TORCHELASTIC_RUN_ID": "x"}, (0, 2, None, None)),
        ({**OPEN_MPI, **TORCH, "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, (0, 1, None, None)),
        # Set by hand: one task for each node starts several ranks; another launcher's variables repeated.
        ({**SLURM, **TORCH, "RANK": "17", "WORLD_SIZE": "88"}, (17, 88, None, None)),
        ({**OPEN_MPI, "RANK": "1", "WORLD_SIZE": "2"}, (1, 2, None, None)),
        ({**OPEN_MPI, "WORLD_SIZE": "2"}, (1, 2, 1, 2)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "77", **TORCH}, (0, 2, None, None)),
    ],
)
def test_places(environ, expected):
    place = Place.find(environ)
    assert (place and (place.rank, place.world_size, place.local_rank, place.local_size)) == expected


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: expected a whole number, found '' in the environment, which has RANK=0"),
        ({"WORLD_SIZE": "2"}, "RANK: expected a whole number, found '' in the environment, which has WORLD_SIZE=2"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE: expected a whole number, found ''"),
        ({"PMI_SIZE": "2"}, "PMI_RANK: expected a whole number, found ''"),
        ({"SLURM_PROCID": "3"}, "SLURM_STEP_NUM_TASKS: expected a whole number, found ''"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, "expected OMPI_COMM_WORLD_RANK < OMPI_COMM_WORLD_SIZE and"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "9" * 5000}, "OMPI_COMM_WORLD_SIZE: expected a whole number, found"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "expected RANK < WORLD_SIZE"),
        ({**OPEN_MPI, **TORCH, "WORLD_SIZE": "1"}, "found RANK=0, WORLD_SIZE=1 in the environment, but Open MPI says"),
        (
            {**OPEN_MPI, **TORCH},
            "found RANK=0, WORLD_SIZE=2 in the environment, but Open MPI says OMPI_COMM_WORLD_RANK=1",
        ),
        ({**OPEN_MPI, "WORLD_SIZE": "4"}, "WORLD_SIZE: found '4' in the environment, but Open MPI says"),
        ({**SLURM, **TORCH, "WORLD_SIZE": "1"}, "found RANK=0, WORLD_SIZE=1 in the environment, but Slurm says"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, "but this process is in no step of Slurm"),
    ],
)
def test_what_cannot_be(environ, says):
    """`smp.init` made N jobs of one process of most of these."""
    with pytest.raises(ConfigError) as caught:
        Place.find(environ)
    assert str(caught.value).startswith(says) or says in str(caught.value)


def test_where_the_processes_meet():
    here = Launch.read(OPEN_MPI)
    assert (here.rank, here.world_size, here.local_rank, here.local_size, here.single_host) == (1, 2, 1, 2, True)
    other = Launch.read({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert (here.master_addr, here.master_port) == (other.master_addr, other.master_port), "all processes take the same"
    assert Launch.read({**OPEN_MPI, "PMIX_NAMESPACE": "584908802"}).master_port != here.master_port
    there = Launch.read(SLURM)
    assert (there.master_addr, there.single_host) == ("gpu03", False)
    assert Launch.read({**SLURM, **MASTER}).master_port == 29500
    with pytest.raises(ConfigError) as caught:
        Launch.read(HYDRA)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()[:-1]] == ["MASTER_PORT", "MASTER_ADDR"]


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("gpu[03-07,9],login1", "gpu03"),
        ("rack[1-2]n[01-16],x", "rack1n01"),
        ("tux[0-1][0-3]", "tux00"),
        ("a,b[1-2]", "a"),
        ("n[7]-ib", "n7-ib"),
    ],
)
def test_the_first_of_a_list_of_hosts(hosts, first):
    place = Place.find({**SLURM, "SLURM_STEP_NODELIST": hosts})
    assert place is not None
    assert place.first_host == first
