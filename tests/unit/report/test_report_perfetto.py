"""timeline.json: slices on the right tracks, arrows that begin and end inside slices, counters that reach the peak."""

import collections
import itertools
import json

import pytest
from report_cases import compilation

from smpc.report.perfetto import perfetto_json


@pytest.fixture(scope="module")
def found():
    return compilation()


@pytest.fixture(scope="module")
def events(found):
    data = json.loads(perfetto_json(found.plan, found.timeline()))
    assert data["otherData"]["plan"] == found.plan.fingerprint
    by_phase = collections.defaultdict(list)
    for event in data["traceEvents"]:
        by_phase[event["ph"]].append(event)
    return by_phase


def test_a_track_for_each_rank(found, events):
    names = {event["tid"]: event["args"]["name"] for event in events["M"] if event["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    for rank in names:
        slices = sorted((event["ts"], event["ts"] + event["dur"]) for event in events["X"] if event["tid"] == rank)
        assert len(slices) == 8
        assert all(after[0] >= before[1] - 1e-6 for before, after in itertools.pairwise(slices))
    last = max(event["ts"] + event["dur"] for event in events["X"])
    assert last == pytest.approx(found.plan.schedule.step_time * 1e6)


def test_an_arrow_for_each_message(found, events):
    starts = {event["id"]: event for event in events["s"]}
    ends = {event["id"]: event for event in events["f"]}
    edges = [edge for edge in found.plan.edges if edge.source >= 0]
    assert len(edges) >= 2
    expected = 4 * sum(2 if edge.gradient_bytes else 1 for edge in edges)
    assert len(starts) == len(events["s"]) == len(events["f"]) == expected
    assert starts.keys() == ends.keys()
    total = sum(event["args"]["bytes"] for event in events["s"])
    assert total == 4 * sum(edge.num_bytes + edge.gradient_bytes for edge in edges)
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] < end["ts"]
        assert start["tid"] != end["tid"]
        for point in (start, end):  # the importer takes the slice around it
            around = [
                event
                for event in events["X"]
                if event["tid"] == point["tid"] and event["ts"] <= point["ts"] < event["ts"] + event["dur"] - 1e-9
            ]
            assert len(around) == 1


def test_counters_reach_the_peak(found, events):
    for stage in found.plan.stages:
        held = [sum(e["args"].values()) for e in events["C"] if e["name"] == f"memory of rank {stage.rank}"]
        assert max(held) == stage.peak_memory_bytes


def test_same_bytes(found):
    again = compilation.__wrapped__()
    assert perfetto_json(again.plan, again.timeline()) == perfetto_json(found.plan, found.timeline())
