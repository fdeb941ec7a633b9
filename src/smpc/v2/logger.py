"""Source: public training scripts for SMP v2."""

from __future__ import annotations

import logging

__all__ = ["get_logger"]


def get_logger(name: str = "smpc") -> logging.Logger:
    """The logger of the library, of level INFO unless it has been set; messages go to stderr unless the script has handlers."""
    logger = logging.getLogger(name)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    return logger
