"""`smp.state_mod.state`: the state of `smp.state`, under the name of the module that scripts import it from."""

from smpc.v1.session.process_state import state

__all__ = ["state"]
