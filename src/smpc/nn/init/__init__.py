"""Creating parameters where they belong: delayed, and as slices."""
