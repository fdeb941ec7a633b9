"""The emitted files: readable, the same every time, importable, and the code that runs."""

import importlib.util
import sys

import pytest
import torch
import zoo
from random_plans import compile_assignment, contiguous

from smpc.codegen.printer import describe_channel, emit_rank
from smpc.codegen.program import Instruction
from smpc.codegen.stage import build_stage
from smpc.compile import compile_model
from smpc.sample_inputs import first_microbatch
from smpc.tracer import record


def load(source, path):
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_two_compiles_give_the_same_bytes():
    texts = []
    for _ in range(2):
        model, batch = zoo.build("t5")
        compilation = compile_model(model, batch, pipeline_parallel_degree=3, microbatches=4)
        texts.append([compilation.plan.to_json(), compilation.schedule_text(), *map(compilation.rank_source, range(3))])
    assert texts[0] == texts[1]


def test_files_import_and_hold_the_program(tmp_path):
    for name in ("gpt2", "lstm", "unet"):
        model, batch = zoo.build(name)
        compilation = compile_model(model, batch, pipeline_parallel_degree=2, microbatches=2)
        for program in compilation.programs:
            module = load(emit_rank(program), tmp_path / f"emitted_{name}_{program.rank}.py")
            assert [Instruction.parse(line) for line in module.INSTRUCTIONS] == list(program.instructions)
            assert list(module.STAGES) == [code.index for code in program.stages]
            for code in program.stages:
                assert code.source in emit_rank(program)


def test_emitted_stages_compute_what_the_model_computes(tmp_path):
    model, batch = zoo.build("unet")
    args, kwargs = first_microbatch(batch, 2)
    trace = record(model, args, kwargs)
    compilation = compile_assignment(trace, contiguous(trace, 3, 5), placement=(0, 1, 0))
    values = dict(zip((node.name for node in trace.nodes if node.kind == "placeholder"), args, strict=True))
    modules = [load(emit_rank(p), tmp_path / f"emitted_placed_{p.rank}.py") for p in compilation.programs]
    for index, rank in enumerate((0, 1, 0)):
        (code,) = [code for code in compilation.programs[rank].stages if code.index == index]
        emitted = modules[rank].STAGES[index].forward
        outputs = emitted(build_stage(code, model), *(values[name] for name in code.inputs))
        values.update(zip(code.outputs, outputs, strict=True))
    assert torch.equal(values[trace.output_names[0]], model(*args))


def test_the_header_names_the_edges_of_the_rank():
    model, batch = zoo.build("unet")
    compilation = compile_model(model, batch, pipeline_parallel_degree=3, microbatches=2)
    header = compilation.rank_source(1).partition('"""\n')[0]
    for channel in compilation.channels:
        assert (describe_channel(channel) in header) == (1 in (channel.source, channel.destination))
    assert "Rank 1 of 3: interleaved schedule, 2 microbatches." in header
    assert compilation.plan.fingerprint in header
