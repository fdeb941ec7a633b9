"""The SMP v2 API over smpc, for scripts that train with FSDP: `import smpc.v2 as tsm`, or `torch.sagemaker` after `smpc.alias()`.

    tsm.init({"hybrid_shard_degree": 4})              once, first; torch.distributed may be initialised already
    tsm.state.rank, tsm.state.tp_process_group        what it decided
    model = FSDP(tsm.transform(model), ...)           the model, to be wrapped

docs/smp_v2.md says what exists, what differs from SMP, and what is refused.
"""

from smpc.v2.session.init import init, is_initialized
from smpc.v2.session.transformation import transform
from smpc.v2.state_handler import state

__all__ = ["init", "is_initialized", "state", "transform"]
