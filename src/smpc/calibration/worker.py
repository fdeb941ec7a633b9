"""A rank of `smpc calibrate --ranks N`: `python -m smpc.calibration.worker FILE SECONDS`, with the launcher's environment."""

from __future__ import annotations

import sys

from smpc.calibration.measure_device import calibrate_to

if __name__ == "__main__":
    calibrate_to(sys.argv[1], float(sys.argv[2]))
