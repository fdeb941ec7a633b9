"""How experts are used: the configuration that `transform` takes.

Source: "torch.sagemaker.moe.moe_config.MoEConfig" in the public reference of SMP v2, and public training scripts.
"""

from __future__ import annotations

from dataclasses import dataclass

from smpc.errors import ConfigError, ConfigTypeError

__all__ = ["MoEConfig"]
_BALANCINGS = ("aux_loss", "sinkhorn", "balanced", "none")
_FLAGS = ("smp_moe", "global_token_shuffle", "moe_all_to_all_dispatcher", "use_cpu_initialization")


@dataclass(frozen=True)
class MoEConfig:
    """See docs/smp_v2.md. ValueError, which lists everything that is wrong, for values that are none."""

    smp_moe: bool = True
    random_seed: int = 12345
    moe_load_balancing: str = "sinkhorn"
    global_token_shuffle: bool = False
    moe_all_to_all_dispatcher: bool = True
    moe_aux_loss_coeff: float = 0.001
    moe_z_loss_coeff: float = 0.001
    use_cpu_initialization: bool = False

    def __post_init__(self) -> None:
        """Check all values."""
        types = [
            f"{name}: expected bool, found {type(getattr(self, name)).__name__} {getattr(self, name)!r}"
            for name in _FLAGS
            if not isinstance(getattr(self, name), bool)
        ]
        if isinstance(self.random_seed, bool) or not isinstance(self.random_seed, int):
            types.append(f"random_seed: expected int, found {type(self.random_seed).__name__} {self.random_seed!r}")
        wrong = []
        if self.moe_load_balancing not in _BALANCINGS:
            wrong.append(
                f"moe_load_balancing: expected one of {', '.join(_BALANCINGS)}, found {self.moe_load_balancing!r}"
            )
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                types.append(f"{name}: expected float, found {type(value).__name__} {value!r}")
            elif not 0 <= value < float("inf"):
                wrong.append(f"{name}: expected a finite number of at least 0, found {value!r}")
        if types:
            raise ConfigTypeError("\n".join(types + wrong))
        if wrong:
            raise ConfigError("\n".join(wrong))
