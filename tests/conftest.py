"""Set before anything is imported: one thread per process, the helpers beside this file importable, Hugging Face's notes about tiny
configurations kept out of the output."""

import logging
import os
import sys
from pathlib import Path

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # reductions then have one order, in workers too: bitwise comparisons are fair
sys.path.insert(0, str(Path(__file__).parent))
logging.getLogger("transformers").setLevel(logging.ERROR)
