"""What the server of `server.py` imports before ranks are forked from it: most of them would import it themselves, in every test."""

import importlib

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
    "smpc.checkpoint",
    "smpc.compile",
    "smpc.v1",
    "smpc.v2.delayed_param",
    "smpc.v2.distributed.checkpoint.state_dict_loader",
    "smpc.v2.grad_norm",
    "smpc.v2.transforming.sharing",
    "checkpoint_harness",
    "executor_harness",
    "forked_launch",
    "zoo",
)

for _name in MODULES:
    importlib.import_module(_name)
