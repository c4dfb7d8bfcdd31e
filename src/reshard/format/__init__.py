"""The file format: shard files, the manifest, values. `docs/format.md` is its specification."""
