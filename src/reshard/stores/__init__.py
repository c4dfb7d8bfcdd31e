"""Where bytes live: keys to bytes, nothing about tensors."""
