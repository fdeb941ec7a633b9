"""Which modules have a distributed version, and replacing them by it."""
