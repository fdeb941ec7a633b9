"""A node's place in a job, from options and the environment."""

import pytest

from smpc.errors import ConfigError
from smpc.launch.nodes import NodeOptions, NodePlace
from smpc.places import meeting_port

MASTER = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("num_ranks", "options", "environ", "expected"),
    [
        (2, {}, {}, NodePlace(2, 2, 0, 0, 1, "127.0.0.1", 0)),
        (2, {"master_port": 1234}, {}, NodePlace(2, 2, 0, 0, 1, "127.0.0.1", 1234)),
        # A job inside a rank of another one.
        (2, {}, {"WORLD_SIZE": "2", "NODE_RANK": "0", **MASTER}, NodePlace(2, 2, 0, 0, 1, "127.0.0.1", 0)),
        (2, {"num_nodes": 1}, {"WORLD_SIZE": "64", **MASTER}, NodePlace(2, 2, 0, 0, 1, "127.0.0.1", 0)),
        (8, {"num_nodes": 2, "node_rank": 1}, MASTER, NodePlace(8, 16, 8, 1, 2, "host0", 29500)),
        (8, {"num_nodes": 2, "node_rank": 1}, {"WORLD_SIZE": "4", **MASTER}, NodePlace(8, 16, 8, 1, 2, "host0", 29500)),
        (8, {}, {"WORLD_SIZE": "16", "NODE_RANK": "1", **MASTER}, NodePlace(8, 16, 8, 1, 2, "host0", 29500)),
        (
            4,
            {"base_rank": 8},
            {"WORLD_SIZE": "12", "NODE_RANK": "1", **MASTER},
            NodePlace(4, 12, 8, 1, 3, "host0", 29500),
        ),
        # Of a job on one node around this one, and of a job of which this launcher is a rank.
        (2, {}, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", **MASTER}, NodePlace(2, 2, 0, 0, 1, "127.0.0.1", 0)),
        (
            2,
            {},
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "1", **MASTER},
            NodePlace(2, 2, 0, 0, 1, "127.0.0.1", 0),
        ),
        (
            4,
            {"node_rank": 1},
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", **MASTER},
            NodePlace(4, 8, 4, 1, 2, "host0", 29500),
        ),
        (
            2,
            {"world_size": 8},
            {"LOCAL_WORLD_SIZE": "8", "NODE_RANK": "3", **MASTER},
            NodePlace(2, 8, 6, 3, 4, "host0", 29500),
        ),
        # Nodes of different size: a number follows from the other one if it is 0.
        (2, {"world_size": 5, "node_rank": 0}, MASTER, NodePlace(2, 5, 0, 0, 3, "host0", 29500)),
        (2, {"world_size": 5, "base_rank": 0}, MASTER, NodePlace(2, 5, 0, 0, 3, "host0", 29500)),
        (2, {"world_size": 5, "node_rank": 1, "base_rank": 3}, MASTER, NodePlace(2, 5, 3, 1, 3, "host0", 29500)),
        (1, {"world_size": 3, "base_rank": 2}, MASTER, NodePlace(1, 3, 2, 2, 3, "host0", 29500)),
        (
            1,
            {"world_size": 2, "node_rank": 1, "master_addr": "a", "master_port": 7},
            MASTER,
            NodePlace(1, 2, 1, 1, 2, "a", 7),
        ),
        # A launcher on every node, started by srun or mpirun: node number, count and master are theirs.
        (
            4,
            {},
            {
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "1",
                "SLURM_NTASKS": "3",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
                "SLURM_STEP_NODELIST": "gpu[07-09]",
            },
            NodePlace(4, 12, 4, 1, 3, "gpu07", meeting_port("Slurm 7.0")),
        ),
        (
            2,
            {},
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
                **MASTER,
            },
            NodePlace(2, 4, 2, 1, 2, "host0", 29500),
        ),
        (
            2,
            {"num_nodes": 1},
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            NodePlace(2, 2, 0, 0, 1, "127.0.0.1", 0),
        ),
        # In a batch script of Slurm, which is no task.
        (
            2,
            {},
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},
            NodePlace(2, 2, 0, 0, 1, "127.0.0.1", 0),
        ),
    ],
)
def test_places(num_ranks, options, environ, expected):
    assert NodeOptions(**options).place(num_ranks, environ) == expected


@pytest.mark.parametrize(
    ("options", "environ", "says"),
    [
        (
            {},
            {"WORLD_SIZE": "many"},
            ["WORLD_SIZE: expected a whole number from 1 to 1048576, found 'many' (from WORLD_SIZE in the"],
        ),
        ({}, {"WORLD_SIZE": "0"}, ["WORLD_SIZE: expected a whole number from 1 to 1048576, found '0'"]),
        (
            {},
            {"WORLD_SIZE": "1"},
            ["--world-size: expected at least the 2 ranks of this node, found 1 (from WORLD_SIZE"],
        ),
        ({"num_nodes": 0}, {}, ["--nnodes: expected a whole number from 1 to 1048576, found '0'"]),
        ({"node_rank": 1}, {}, ["--node-rank: expected 0 in a job of one node, found 1; set --nnodes"]),
        ({"num_nodes": 2}, {}, ["--node-rank: 4 ranks", "--master-addr: 4 ranks"]),
        (
            {"num_nodes": 2, "node_rank": 0},
            {"MASTER_ADDR": "a"},
            ["--master-port: 4 ranks, 2 of them on this node, need"],
        ),
        ({"num_nodes": 2, "node_rank": 2}, MASTER, ["--world-size: expected at least base rank 4 + 2 ranks"]),
        (
            {"num_nodes": 2, "node_rank": 1},
            {**MASTER, "MASTER_PORT": "99999"},
            ["MASTER_PORT: expected a whole number from 1"],
        ),
        # These passed, and ranks waited for others that never came.
        ({"world_size": 5, "node_rank": 1}, MASTER, ["--base-rank: 5 ranks, 2 of them on node 1, need --base-rank"]),
        (
            {"world_size": 5, "base_rank": 3},
            MASTER,
            ["--node-rank: 5 ranks, 2 of them on this node, from rank 3 on, need"],
        ),
        (
            {"world_size": 8, "base_rank": 3},
            MASTER,
            ["--node-rank: 8 ranks, 2 of them on this node, from rank 3 on, need"],
        ),
        (
            {"num_nodes": 4, "node_rank": 1, "base_rank": 4},
            MASTER,
            ["--base-rank: expected 2, as node 1 of nodes with 2"],
        ),
        (
            {"num_nodes": 2, "world_size": 9, "node_rank": 3, "base_rank": 4},
            MASTER,
            ["--node-rank: expected a number below"],
        ),
        ({"world_size": 9, "node_rank": 3, "base_rank": 2}, MASTER, ["--base-rank: expected at least 3, as each of"]),
        (
            {"num_nodes": 2, "node_rank": 0, "base_rank": 2},
            MASTER,
            ["--base-rank: node 0 has base rank 0, found node 0"],
        ),
        (
            {"num_nodes": 2},
            {**MASTER, "NODE_RANK": "-1"},
            ["NODE_RANK: expected a whole number from 0 to 1048576, found '-1'"],
        ),
        # Each of four tasks of a node would have started a job of its own.
        (
            {},
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
            ["--nnodes: Open MPI says OMPI_COMM_WORLD_RANK=5, OMPI_COMM_WORLD_SIZE=8, with several tasks on this node"],
        ),
    ],
)
def test_what_cannot_be(options, environ, says):
    with pytest.raises(ConfigError) as caught:
        NodeOptions(**options).place(2, environ)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(says), lines
    for line, expected in zip(lines, says, strict=True):
        assert line.startswith(expected)
