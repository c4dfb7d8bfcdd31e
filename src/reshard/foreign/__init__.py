"""Checkpoints of others, described by manifests: they are then read like our own."""
