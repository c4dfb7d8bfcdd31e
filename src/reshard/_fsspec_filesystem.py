"""Checkpoints anywhere that fsspec reaches, under the module name that torch has before 2.15."""

from reshard.fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter

__all__ = ["FileSystem", "FsspecReader", "FsspecWriter"]
