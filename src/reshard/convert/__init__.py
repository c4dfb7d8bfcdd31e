"""Checkpoints in other formats, streamed: memory does not depend on the size of the model."""
