"""Distributed checkpoints for PyTorch: save on any mesh, load on any other."""

from reshard.api import CheckpointException
from reshard.checkpoints import Comparison, convert, delete, materialise, same
from reshard.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from reshard.filesystem import FileSystemReader, FileSystemWriter
from reshard.fsspec_filesystem import FsspecReader, FsspecWriter
from reshard.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from reshard.manager import CheckpointManager, Restored
from reshard.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from reshard.object_storage import ObjectStoreReader, ObjectStoreWriter
from reshard.optimizer import load_sharded_optimizer_state_dict
from reshard.patching import patch
from reshard.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from reshard.policies import (
    AtSteps,
    Best,
    EveryMinutes,
    EverySteps,
    KeepPolicy,
    Latest,
    LatestFor,
    Newer,
    SavePolicy,
)
from reshard.protocol import CheckpointableTensor
from reshard.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from reshard.rank_values import per_rank
from reshard.state_dict_loader import (
    LoadReceipt,
    LoadReport,
    load,
    load_state_dict,
    read_state_dict,
    read_tensor,
)
from reshard.state_dict_saver import (
    async_save,
    close,
    finish_staging,
    prewarm,
    save,
    save_state_dict,
)
from reshard.storage import StorageReader, StorageWriter

__all__ = [
    "AtSteps",
    "Best",
    "BytesStorageMetadata",
    "CheckpointException",
    "CheckpointManager",
    "CheckpointableTensor",
    "ChunkStorageMetadata",
    "Comparison",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "EveryMinutes",
    "EverySteps",
    "FileSystemReader",
    "FileSystemWriter",
    "FsspecReader",
    "FsspecWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "KeepPolicy",
    "Latest",
    "LatestFor",
    "LoadPlan",
    "LoadPlanner",
    "LoadReceipt",
    "LoadReport",
    "Metadata",
    "Newer",
    "ObjectStoreReader",
    "ObjectStoreWriter",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "Restored",
    "SavePlan",
    "SavePlanner",
    "SavePolicy",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "async_save",
    "close",
    "convert",
    "delete",
    "finish_staging",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "materialise",
    "patch",
    "per_rank",
    "prewarm",
    "read_state_dict",
    "read_tensor",
    "same",
    "save",
    "save_state_dict",
]
