"""The file format of a checkpoint: contents, manifest, tensors, checksums. Nothing read here is trusted, or run."""
