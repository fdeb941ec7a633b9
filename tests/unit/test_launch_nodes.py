"""A node's place in a job, from options and the environment."""

import pytest

from smpc.errors import ConfigError
from smpc.launch_nodes import NodeOptions, Place

MASTER = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("num_ranks", "options", "environ", "expected"),
    [
        (2, {}, {}, Place(2, 2, 0, 0, 1, "127.0.0.1", 0)),
        (2, {"master_port": 1234}, {}, Place(2, 2, 0, 0, 1, "127.0.0.1", 1234)),
        # A job inside a rank of another one.
        (2, {}, {"WORLD_SIZE": "2", "NODE_RANK": "0", **MASTER}, Place(2, 2, 0, 0, 1, "127.0.0.1", 0)),
        (2, {"num_nodes": 1}, {"WORLD_SIZE": "64", **MASTER}, Place(2, 2, 0, 0, 1, "127.0.0.1", 0)),
        (8, {"num_nodes": 2, "node_rank": 1}, MASTER, Place(8, 16, 8, 1, 2, "host0", 29500)),
        (8, {"num_nodes": 2, "node_rank": 1}, {"WORLD_SIZE": "4", **MASTER}, Place(8, 16, 8, 1, 2, "host0", 29500)),
        (8, {}, {"WORLD_SIZE": "16", "NODE_RANK": "1", **MASTER}, Place(8, 16, 8, 1, 2, "host0", 29500)),
        (4, {"base_rank": 8}, {"WORLD_SIZE": "12", "NODE_RANK": "1", **MASTER}, Place(4, 12, 8, 1, 3, "host0", 29500)),
        (1, {"world_size": 3, "base_rank": 2}, MASTER, Place(1, 3, 2, 2, 3, "host0", 29500)),
        (
            1,
            {"world_size": 2, "node_rank": 1, "master_addr": "a", "master_port": 7},
            MASTER,
            Place(1, 2, 1, 1, 2, "a", 7),
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
            ["WORLD_SIZE: expected a whole number, at least 1, found 'many' (from WORLD_SIZE in the"],
        ),
        ({}, {"WORLD_SIZE": "0"}, ["WORLD_SIZE: expected a whole number, at least 1, found '0'"]),
        (
            {},
            {"WORLD_SIZE": "1"},
            ["--world-size: expected at least the 2 ranks of this node, found 1 (from WORLD_SIZE"],
        ),
        ({"num_nodes": 0}, {}, ["--nnodes: expected a whole number, at least 1, found '0'"]),
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
        (
            {"num_nodes": 2, "node_rank": 0, "base_rank": 2},
            MASTER,
            ["--base-rank: node 0 has base rank 0, found node 0"],
        ),
        (
            {"num_nodes": 2},
            {**MASTER, "NODE_RANK": "-1"},
            ["NODE_RANK: expected a whole number, at least 0, found '-1'"],
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
