"""Files of instances: the published device-placement problems, our own, and what is neither."""

from __future__ import annotations

import json

import pytest

from smpc.cli.app import main
from smpc.errors import SmpcError
from smpc.partitioner import Link, Node, Processor, read_instance, solve_instance


def published(**changes):
    nodes = [
        {"id": 0, "supportedOnFpga": 0, "cpuLatency": 1.0, "fpgaLatency": 9.0, "isBackwardNode": 0, "colorClass": None, "size": 8},
        {"id": 1, "supportedOnFpga": 1, "cpuLatency": 30.0, "fpgaLatency": 3.0, "isBackwardNode": 0, "colorClass": 5, "size": 8},
        {"id": 2, "supportedOnFpga": 1, "cpuLatency": 30.0, "fpgaLatency": 4.0, "isBackwardNode": 0, "size": 8, "name": "other"},
        {"id": 3, "supportedOnFpga": 1, "cpuLatency": 60.0, "fpgaLatency": 6.0, "isBackwardNode": 1, "colorClass": 5, "size": 2},
    ]  # fmt: skip
    edges = [
        {"sourceId": 0, "destId": 1, "cost": 0.5},
        {"sourceId": 1, "destId": 2, "cost": 0.25},
        {"sourceId": 2, "destId": 3, "cost": 1},
    ]
    return {"maxSizePerFPGA": 16, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges, **changes}


def written(tmp_path, data):
    path = tmp_path / "instance.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_published_problem(tmp_path):
    instance = read_instance(written(tmp_path, published()))
    accelerator, cpu = Processor(memory_limit=16, kind="accelerator", bandwidth=1.0), Processor(kind="cpu")
    assert instance.devices == (accelerator, accelerator, cpu)
    assert instance.nodes[0] == Node("0", 1.0, 8, time_on={"accelerator": None, "cpu": 1.0})
    assert instance.nodes[3].backward
    assert instance.edges == (Link("0", "1", 0.5), Link("1", "2", 0.25), Link("2", "3", 1))
    assert instance.together == (("1", "3"),)
    assert (instance.split, instance.may_idle) == ("contiguous", True)


def test_the_load_of_a_published_problem(tmp_path):
    """The CPU has node 0 for nothing more; node 2 has an accelerator alone: 0.25 in, 1 out, 4. The other one: 0.5 + 1 in, 0.25 out, 9."""
    found = solve_instance(read_instance(written(tmp_path, published())))
    assert sorted(found.times) == [1.0, 5.25, 10.75]
    assert found.gap == pytest.approx(0.0, abs=1e-6)
    assert found.stage_of["1"] == found.stage_of["3"] != found.stage_of["2"]
    free = solve_instance(read_instance(written(tmp_path, published()), split="free"))
    assert max(free.times) == 10.75


def test_a_file_of_our_own(tmp_path):
    data = {
        "nodes": [{"name": "a", "time": 2, "time_on": {"cpu": 4}}, {"name": "b", "time": 2, "backward": True}],
        "edges": [{"source": "a", "target": "b", "num_bytes": 1}],
        "devices": [{"bandwidth": 2}, {"kind": "cpu"}],
        "split": "free",
    }
    instance = read_instance(written(tmp_path, data))
    assert instance.nodes[0] == Node("a", 2, time_on={"cpu": 4})
    assert instance.split == "free"
    assert read_instance(written(tmp_path, data), split="row").split == "row"
    assert solve_instance(instance).times == (2.5, 4.0) or solve_instance(instance).times == (2.5, 2.0)


BAD = {
    "no file": (None, "cannot read it"),
    "no JSON": ("{", "JSON"),
    "a list": ("[]", "expected a JSON object"),
    "neither": ({"a": 1}, "expected an object with nodes, edges and devices"),
    "no nodes": (published(nodes=None), "nodes None, which must be a list"),
    "a node that is none": (published(nodes=[3]), "nodes.0 3, which must be an object"),
    "no id": (published(nodes=[{"fpgaLatency": 1}]), "nodes.0.id None"),
    "a time that is none": (published(nodes=[{"id": 0, "fpgaLatency": "1"}]), "nodes.0.fpgaLatency '1'"),
    "a negative time": (published(nodes=[{"id": 0, "fpgaLatency": -1}], edges=[]), "of node 0"),
    "no such node": (published(edges=[{"sourceId": 0, "destId": 77}]), "edge 0 -> 77 of an unknown node 77"),
    "twice": (published(nodes=[{"id": 0, "fpgaLatency": 1}] * 2, edges=[]), "2 nodes called 0"),
    "a circle": (published(edges=[{"sourceId": 1, "destId": 2}, {"sourceId": 2, "destId": 1}]), "without cycles, found 1 -> 2 -> 1"),
    "too many": (published(maxFPGAs=10**9), "maxFPGAs 1000000000, which must be a whole number from 0 to 128"),
    "no device": (published(maxFPGAs=0, maxCPUs=0), "no device"),
    "a flag": (published(nodes=[{"id": 0, "supportedOnFpga": "yes"}]), "nodes.0.supportedOnFpga 'yes', which must be 0 or 1"),
    "a color": (published(nodes=[{"id": 0, "colorClass": [1]}]), "nodes.0.colorClass [1]"),
    "a name of two lines": (published(nodes=[{"id": "a\nb", "fpgaLatency": -1}], edges=[]), "a\\nb"),
    "a split": ({"nodes": [{"name": "a", "time": 1}], "edges": [], "devices": 1, "split": ["row"]}, "split ['row']"),
    "a table": ({"nodes": [{"name": "a", "time": 1, "time_on": 3}], "edges": [], "devices": 1}, "time_on 3 of node 0"),
    "names": ({"nodes": [{"name": ["a"], "time": 1}], "edges": [], "devices": 1}, "the name ['a'] of node 0"),
    "groups": ({"nodes": [{"name": "a", "time": 1}], "edges": [], "devices": 1, "together": 3}, "together to be a list"),
    "no rows": ({"nodes": 3, "edges": [], "devices": 1}, "expected a list of Node objects, found int"),
    "devices": ({"nodes": [{"name": "a", "time": 1}], "edges": [], "devices": 10**12}, "devices from 1 to 100000"),
    "fewer than none": ({"nodes": [{"name": "a", "time": 1}], "edges": [], "devices": -1}, "devices from 1 to 100000, found -1"),
    "a flag for a number": ({"nodes": [{"name": "a", "time": 1}], "edges": [], "devices": True}, "Processor objects, found bool"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_instance_is_an_error_of_one_line(tmp_path, case):
    data, text = BAD[case]
    path = tmp_path / "none.json" if data is None else written(tmp_path, data)
    with pytest.raises(SmpcError) as caught:
        read_instance(path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_command_shows_what_it_found(tmp_path, capsys):
    path = str(written(tmp_path, published()))
    assert main(["solve", path]) == 0
    shown = capsys.readouterr().out
    assert "4 nodes, 3 edges, contiguous splits" in shown
    assert "largest time 10.75" in shown
    assert [row.split()[1] for row in shown.splitlines() if row.strip()[:1].isdecimal()][1:] == [
        "accelerator",
        "accelerator",
        "cpu",
    ]
    assert main(["solve", path, "--split", "free", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert max(found["times"]) == 10.75
    assert found["stage_of"]["1"] == found["stage_of"]["3"]


def test_nodes_that_take_no_time_are_proven(tmp_path, capsys):
    """A load of nothing is the least there is."""
    data = {"nodes": [{"name": "a", "time": 0}], "edges": [], "devices": 1}
    assert main(["solve", str(written(tmp_path, data))]) == 0
    assert "at most 0.000% above the optimum" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "options"),
    [("{", ()), ('{"nodes": 3}', ()), (json.dumps(published(edges=3)), ()), (json.dumps(published()), ("--split", "round")),
     (json.dumps(published(maxCPUs=0)), ()), (json.dumps(published()), ("--gap", "-1")), (None, ()),
     (json.dumps(published()), ("--gap", "nan")), (json.dumps(published()), ("--time-limit", "nan"))],
)  # fmt: skip
def test_the_command_says_in_one_line_what_is_wrong(tmp_path, capsys, content, options):
    path = tmp_path / "none.json" if content is None else written(tmp_path, content)
    assert main(["solve", str(path), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("smpc: error: ")
    assert err.count("\n") == 1
