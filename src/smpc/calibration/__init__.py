"""Measures this machine and describes it as a device that times can be predicted for: `smpc calibrate`.

    device = calibrate(Ranks.here(), seconds=60)        collective over the ranks; the same on all of them
    to_toml(device, note)                               the file that --device takes

Models of the common operations are recorded and run, node by node, as a plan counts them (`probes`, `operations`); where there are several
ranks, all work at once, as in training, and then send each other messages (`communication`).
"""

from smpc.calibration.measure_device import calibrate, to_toml
from smpc.calibration.measuring_processes import CalibrationRanks

__all__ = ["CalibrationRanks", "calibrate", "to_toml"]
