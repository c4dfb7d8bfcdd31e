"""A run and its checkpoints: what lies in its root, who holds it, what is kept, what is decided."""
