"""Names that DCP and Hugging Face give to files and to fields in them."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import IO, Any

import torch

from reshard.foreign.safetensors import (
    INDEX,
    OFFSETS_FIELD,
    SHARDING_NOTE,
    SUFFIX,
    VERSION_NOTE,
    file_name,
)
from reshard.format.plain_dtypes import PLAIN_DTYPES

__all__ = ["DTYPE_MAP", "SUFFIX"]

_metadata_fn = INDEX
FILE_NAME = "model-{cpt_idx}-of-{num_files}"
SHARDED_FILE_NAME = "shard-{shard_idx}-model-{cpt_idx}-of-{num_files}"
SHARDED_DIR_NAME = "sharded"

CUSTOM_METADATA_KEY = DCP_SHARDING_INFO_KEY = SHARDING_NOTE
DCP_VERSION_KEY = VERSION_NOTE
HF_DCP_VERSION = 1.0
DEFAULT_EXTRA_METADATA_KEY = "__metadata__"
SAVED_OFFSETS_KEY = OFFSETS_FIELD
SHAPE_KEY, DATA_KEY, DTYPE_KEY, DATA_OFFSETS_KEY = "shape", "data", "dtype", "data_offsets"
FORMAT_KEY, FORMAT_VALUE = "format", "pt"
NUM_BYTES_FOR_HEADER_LEN = 8
DTYPE_MAP = dict(PLAIN_DTYPES)


def _gen_file_name(index: int, largest_index: int, shard_index: int | None = None) -> str:
    """The name of the file with a number, of as many as the largest."""
    return file_name(index, largest_index, shard_index)


@dataclass
class _HFStorageInfo:
    """Where a chunk is: the path of its file, and its form there."""

    relative_path: str
    shape: torch.Size
    dtype: torch.dtype


def _get_safetensors_file_metadata(file_bytes: IO[bytes]) -> tuple[Any, int]:
    """The header of a safetensors file, and where its data begins."""
    (nbytes,) = struct.unpack("<Q", file_bytes.read(NUM_BYTES_FOR_HEADER_LEN))
    return json.loads(file_bytes.read(nbytes)), NUM_BYTES_FOR_HEADER_LEN + nbytes


def _get_dtype(dtype_str: str) -> torch.dtype:
    """A dtype by the name that safetensors has for it; the default one for other names."""
    return DTYPE_MAP.get(dtype_str, torch.get_default_dtype())


def _get_dcp_custom_metadata(metadata: Any) -> Any | None:
    """Where the regions in a file begin, according to its header; None if it does not say."""
    text = metadata.get(DEFAULT_EXTRA_METADATA_KEY, {}).get(CUSTOM_METADATA_KEY)
    return None if text is None else json.loads(text)
