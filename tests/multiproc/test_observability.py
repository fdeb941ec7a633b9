"""Reports and traces of real ranks: `smpc run` end to end, `Runtime.report` over gloo, clocks that differ, wires."""

import json
import os
import time

import parity
import pytest
import torch
import torch.distributed as dist
import warm
from executor_harness import run_workers
from torch import nn

from smpc.compile import compile_model
from smpc.executor.measure.link_measurement import clock_offset, measure_wire
from smpc.executor.transport import GlooTransport
from smpc.partitioner.graph.plan import INPUTS, Plan
from smpc.runtime import Runtime

MICROBATCHES = 4
SCRIPT = """
import sys, torch
from torch import nn
import smpc
import smpc.v1 as smp

degree, steps, fails_at = (int(text) for text in sys.argv[1:4])
smp.init({"pipeline_parallel_degree": degree, "microbatches": 4})
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())]
model = smp.DistributedModel(nn.Sequential(*layers, nn.Linear(256, 1)))
optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
if len(sys.argv) > 4:
    infos = []
    model.register_step_callback(smpc.TensorBoard(sys.argv[4]))
    model.register_step_callback(infos.append)

@smp.step
def train_step(model, x):
    loss = (model(x) ** 2).mean()
    model.backward(loss)
    return loss

for step in range(steps):
    optimizer.zero_grad()
    loss = train_step(model, torch.randn(64, 256)).reduce_mean()
    optimizer.step()
    if step == fails_at:
        raise KeyError("mine")
    if len(sys.argv) > 4:
        assert infos[-1].step == step and abs(infos[-1].loss - loss.item()) < 1e-6, (infos[-1], loss)
        assert infos[-1].samples == 64 and 0 <= infos[-1].bubble < 1, infos[-1]
"""


def run(tmp_path, *arguments, script_arguments, status=0):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SMPC_")}
    command = ["run", "--console", "all", *arguments, str(script), *map(str, script_arguments)]
    done = warm.run(*command, timeout=400, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def expected_messages(plan):
    """(global rank that sends, that receives) of every message of one step, from the edges of the plan."""
    rank_of = {INPUTS: 0, **{stage.index: stage.rank for stage in plan.stages}}
    found = []
    for edge in plan.edges:
        ends = rank_of[edge.source], rank_of[edge.destination]
        if ends[0] != ends[1]:
            found += [ends] * MICROBATCHES + [ends[::-1]] * (MICROBATCHES if edge.gradient_bytes else 0)
    return sorted(found)


@pytest.mark.long
def test_report_and_trace(tmp_path):
    """Two ranks, five steps: the report has every number, the arrows of the trace are the messages of the plan."""
    folder, report = tmp_path / "traces", tmp_path / "report.json"
    folder.mkdir()
    (folder / "rank7.json").write_text("of an earlier job")
    options = ("-n", "2", "--report", "--report-to", str(report), "--trace", str(folder), "--trace-steps", "2:4")
    done = run(tmp_path, *options, script_arguments=(2, 5, -1, tmp_path / "runs"))
    found = json.loads(report.read_text())
    lines = {line["what"]: line for line in found["lines"]}
    assert found["num_steps"] == 2
    assert lines.keys() >= {
        "rank 0, peak",
        "rank 1, peak",
        "stage 0, forward",
        "stage 1, backward",
        "pipeline",
        "bubble",
    }
    for line in lines.values():
        assert line["measured"] > 0, line
        assert (line["error"] is None) == (line["what"] == "whole step")
    for rank in (0, 1):
        assert abs(lines[f"rank {rank}, peak"]["error"]) < 0.1
    assert lines["pipeline"]["measured"] < lines["whole step"]["measured"]
    for what in lines:
        assert what in done.stdout
    assert 0 <= found["messages"]["hidden"] <= 1
    plan = Plan.from_json((folder / "plan.json").read_text())
    check_trace(json.loads((folder / "trace.json").read_text()), plan, steps=2)
    predicted = json.loads((folder / "predicted.json").read_text())
    assert predicted["otherData"] == {"plan": plan.fingerprint, "kind": "predicted"}
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["rank0", "rank1"]


def check_trace(trace, plan, steps):
    measured = [event for event in trace["traceEvents"] if event["pid"] == 1]
    slices = [event for event in measured if event["ph"] == "X"]
    assert sum(event["cat"] == "forward" for event in slices) == steps * MICROBATCHES * 2
    arrows = {}
    for event in measured:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
    ends = sorted((arrow["s"]["tid"], arrow["f"]["tid"]) for arrow in arrows.values())
    assert ends == sorted(expected_messages(plan) * steps)
    for arrow in arrows.values():
        assert arrow["s"]["ts"] <= arrow["f"]["ts"], "no message arrives before it is sent: the clocks agree"
        inside = [
            (event["args"]["instruction"].split()[0], event["args"]["step"])
            for end in arrow.values()
            for event in slices
            if event["cat"] == "communication" and event["tid"] == end["tid"]
            if event["ts"] <= end["ts"] <= event["ts"] + event["dur"]
        ]
        ops, numbers = zip(*inside, strict=True)
        assert ops in (("SEND", "RECV"), ("SEND_GRAD", "RECV_GRAD"))
        assert len(set(numbers)) == 1


@pytest.mark.slow
def test_one_rank_a_failure_and_too_few_steps(tmp_path):
    """What is recorded when a script fails is written all the same; without a pipeline a plan is made for the report."""
    done = run(tmp_path, "--report", script_arguments=(1, 4, 3), status=1)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("rank 0, peak")]
    assert abs(float(line.split()[-1].rstrip("%"))) < 1
    assert "whole step" in done.stdout
    assert "KeyError" in done.stderr
    done = run(tmp_path, "--report", "--trace-steps", "30:40", script_arguments=(1, 2, -1))
    assert "the ranks ran 2 steps, steps 30:40 were to be recorded" in done.stderr


def observe(rank, folder):
    skew = rank * 5_000_000_000
    offset = clock_offset(dist.group.WORLD, torch.device("cpu"), lambda: time.monotonic_ns() - skew)
    transport = GlooTransport(dist.new_group())
    wire = measure_wire(transport, rank, 2)
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())])
    batch = ((torch.randn(64, 256),), {})
    compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2, device="cpu")
    runtime = Runtime(model, rank=rank, transport=transport)
    program = runtime.install(compilation)
    optimizer = torch.optim.Adam(runtime.stages[rank].parameters())
    microbatches = parity.split(batch, 2) if rank == 0 else None

    def step():
        optimizer.zero_grad()
        start = time.monotonic()
        runtime.run(program, microbatches, lambda _, output: [(output.square().mean(), None)], training=True)
        return time.monotonic() - start

    step()
    optimizer.step()
    runtime.observe(2, optimizer)
    walls = [step() for _ in range(3)]
    return offset - skew, wire, runtime.report(dist.group.WORLD), walls[1:]


def test_reports_over_gloo(tmp_path):
    """Both ranks have the same report; the steps in it are those that a timer around them has seen."""
    (zero, wire, report, walls), (late, same, other, others) = run_workers(observe, 2, tmp_path)
    assert zero == 0
    assert abs(late) < 1_000_000_000, "the clock was 5 s off"
    assert report == other
    assert wire == same
    assert wire.bandwidth > 0
    assert 0 <= wire.latency < 1
    assert report.num_steps == 2
    assert 0 < report.line("pipeline").measured <= report.line("whole step").measured
    assert report.line("pipeline").measured <= max(map(max, zip(walls, others, strict=True)))
    for rank in (0, 1):
        assert abs(report.line(f"rank {rank}, peak").error) < 0.1, str(report)
    assert 0 < report.line("bubble").measured < 1
    assert report.messages.num_messages >= 4  # an activation and a gradient of each microbatch
