"""Makes the helpers beside this file importable, and keeps Hugging Face's notes about tiny configurations out of the output."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
logging.getLogger("transformers").setLevel(logging.ERROR)
