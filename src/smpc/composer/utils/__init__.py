"""`smpc.composer.utils.dist` is `smpc.dist`."""

from smpc import dist

__all__ = ["dist"]
