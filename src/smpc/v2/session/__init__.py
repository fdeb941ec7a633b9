"""What `tsm.init` decides: configuration, degrees, groups."""
