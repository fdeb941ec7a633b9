"""What the server of `server.py` does before ranks are forked from it: most of them would do it themselves, in every test.

It imports modules, and records three models: the first recording of a process fills torch's tables of what operations do to shapes, which
takes as long as the recording itself. Two of them it plans as most tests do, with four microbatches: the first plan of a process runs every
kind of operation backward to see its memory. Where there is a GPU it does not, since autograd then starts threads, which a fork loses.

What is there by then is frozen: collecting garbage, a rank looks through its own objects alone, which saves a tenth of its time.
"""

import gc
import importlib
import logging

MODULES = (
    "numpy.ctypeslib",
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "torch.profiler",
    "torch.utils.checkpoint",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("bert", "gpt2", "gpt_neo", "gpt_neox", "llama", "mixtral", "t5")
    ),
    "transformers.trainer",
    "smpc.checkpoint",
    "smpc.cli",
    "smpc.compile",
    "smpc.composer",
    "smpc.integrations.huggingface",
    "smpc.v1",
    "smpc.v2.delayed_param",
    "smpc.v2.distributed.checkpoint.state_dict_loader",
    "smpc.v2.grad_norm",
    "smpc.v2.transforming.sharing",
    "checkpoint_harness",
    "executor_harness",
    "forked_launch",
    "warm",
    "zoo",
)

for _name in MODULES:
    importlib.import_module(_name)


def _record_and_plan() -> None:
    import torch
    import zoo

    from smpc.compile import compile_model
    from smpc.tracer.record import record

    logging.getLogger("transformers").setLevel(logging.ERROR)
    with torch.random.fork_rng(devices=()):
        for name in ("gpt2", "llama", "t5"):
            model, (arguments, options) = zoo.build(name)
            if name == "t5" or torch.cuda.device_count():
                record(model, arguments, options)
            else:
                compile_model(model, options, pipeline_parallel_degree=2, microbatches=4)


_record_and_plan()
gc.collect()
gc.freeze()
