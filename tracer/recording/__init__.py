"""The recorder: torch calls and module calls of one run become nodes and spans."""
