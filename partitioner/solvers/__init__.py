"""From units, costs and devices to a placement with a proven bound. Nothing here knows models."""
