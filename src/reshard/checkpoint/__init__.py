"""A checkpoint as files: names, manifest and metadata, what is read and written."""
