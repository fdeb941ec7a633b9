"""When a rank fails, stalls or does not come: every rank stops and shows which one it was and why."""
