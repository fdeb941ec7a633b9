"""The session that `tsm.init` makes: configuration, degrees, groups."""
