"""Files of `torch.save`: one archive with a pickle, and a storage for each group of tensors."""

from __future__ import annotations

from contextlib import closing

from reshard.checkpoint.planner_data import pack_planner_data
from reshard.checkpoint.torch_archives import FlatArchive, read_archive, value_codec
from reshard.checkpoint.torch_records import strided_codec
from reshard.foreign.tables import ForeignChunk, ForeignTable, ForeignTensor, ForeignValue
from reshard.format.checks import check_dtypes
from reshard.format.tables import TORCH, Manifest
from reshard.format.torch_zip import StoredTensor, place_tensor
from reshard.plans.write_items import REQUIRES_GRAD
from reshard.stores.protocol import Store
from reshard.tensors.flatten import Rules


def read_file(store: Store, key: str, rules: Rules = Rules.CURRENT) -> Manifest:
    """What a file holds, flattened by some rules.

    Names of the same elements of a storage are names of one tensor.
    """
    where = f"{key!r} of {store.location}"
    with closing(store.open_reader(key)) as reader:
        flat = read_archive(reader, where, rules)
        codecs: dict[str, int] = {}
        table = ForeignTable(
            TORCH,
            {key: reader.nbytes},
            _tensors(flat, codecs, where),
            _values(flat, codecs, value_codec(rules)),
            list(codecs),
            pack_planner_data(flat.paths),
        )
    return table.to_manifest(where, shared_bytes=True)


def _tensors(flat: FlatArchive, codecs: dict[str, int], where: str) -> list[ForeignTensor]:
    rows: dict[StoredTensor, int] = {}
    tensors: list[ForeignTensor] = []
    for name, tensor in flat.tensors.items():
        flags = REQUIRES_GRAD if tensor.requires_grad else 0
        key = tensor._replace(requires_grad=False, is_parameter=False)
        same = rows.setdefault(key, len(tensors))
        if same < len(tensors):
            tensors.append(ForeignTensor(name, tensor.dtype, tensor.shape, (), flags, same))
            continue
        check_dtypes([str(tensor.dtype).removeprefix("torch.")], where)
        place = place_tensor(flat.archive, tensor, where)
        codec = 0
        if not place.is_dense:
            codec = codecs.setdefault(strided_codec(tensor, place), len(codecs) + 1)
        chunk = ForeignChunk(
            (0,) * len(tensor.shape), tensor.shape, 0, place.begin, place.span, codec
        )
        tensors.append(ForeignTensor(name, tensor.dtype, tensor.shape, [chunk], flags))
    return tensors


def _values(flat: FlatArchive, codecs: dict[str, int], codec_name: str) -> list[ForeignValue]:
    pickled = flat.archive.locate("data.pkl")
    codec = codecs.setdefault(codec_name, len(codecs) + 1) if flat.values else 0
    return [
        ForeignValue(
            name, 0, pickled.begin, pickled.nbytes, codec, flat.closed_in(name) is not None
        )
        for name in flat.values
    ]
