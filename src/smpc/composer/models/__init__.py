"""`smpc.composer.models.ComposerModel`."""

from smpc.composer.model import ComposerModel

__all__ = ["ComposerModel"]
