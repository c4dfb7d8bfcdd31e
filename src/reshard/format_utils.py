"""Between checkpoints and files of torch.save, under the names that DCP users import.

`python -m reshard.format_utils torch_to_dcp SOURCE TARGET` converts one, and `dcp_to_torch` back.
`reshard.convert` does the same and more.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Literal

from reshard.api import CheckpointException
from reshard.checkpoints import convert
from reshard.convert.torch_save_reader import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from reshard.default_planner import _EmptyStateDictLoadPlanner
from reshard.state_dict_loader import _load_state_dict

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "_EmptyStateDictLoadPlanner",
    "_load_state_dict",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
]


def dcp_to_torch_save(
    dcp_checkpoint_dir: str | os.PathLike[str],
    torch_save_path: str | os.PathLike[str],
    *,
    allow_pickle: bool = False,
) -> None:
    """Write what a checkpoint of any kind holds as one file of torch.save.

    For one process. Data is streamed, so that the model need not fit into memory. A file that
    is there is replaced, once the new one is complete and durable. Values that are stored as
    pickles need `allow_pickle`.
    """
    convert(
        dcp_checkpoint_dir,
        torch_save_path,
        "torch",
        overwrite=True,
        allow_pickle=allow_pickle,
        no_dist=True,
    )


def torch_save_to_dcp(
    torch_save_path: str | os.PathLike[str],
    dcp_checkpoint_dir: str | os.PathLike[str],
    *,
    format: Literal["reshard", "dcp"] = "reshard",
    allow_pickle: bool = False,
) -> None:
    """Save what a file of torch.save holds as a checkpoint, which loads on any mesh.

    For one process. The pickle of the file is not run; objects that only pickle could make need
    `allow_pickle`. Atomic, as every save is. With `format="dcp"` it is one that
    `torch.distributed.checkpoint` itself loads.
    """
    convert(
        torch_save_path,
        dcp_checkpoint_dir,
        format,
        overwrite=True,
        allow_pickle=allow_pickle,
        no_dist=True,
    )


def _main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m reshard.format_utils",
        description="Convert a checkpoint into a file of torch.save, or back.",
    )
    parser.add_argument("mode", choices=["torch_to_dcp", "dcp_to_torch"])
    parser.add_argument("src", help="the file or the directory to convert")
    parser.add_argument("dst", help="the directory or the file to write")
    parser.add_argument("--allow-pickle", action="store_true", help="run pickles in it")
    asked = parser.parse_args(arguments)
    convert_it = torch_save_to_dcp if asked.mode == "torch_to_dcp" else dcp_to_torch_save
    try:
        convert_it(asked.src, asked.dst, allow_pickle=asked.allow_pickle)
    except (CheckpointException, OSError) as error:
        sys.stderr.write(f"{asked.src} was not converted: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
