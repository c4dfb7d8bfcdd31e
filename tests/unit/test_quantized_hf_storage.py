"""Quantised tensors are loaded as torch computes them, from no more bytes than that takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.api import MissingKeyError, UnsupportedFormatError
from reshard.foreign import quantized
from reshard.stores.local import LocalStore
from support.quantized import INDEX, SHAPES, same_bits, torch_reads, write_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("quantized"))


def load(model: Path, target: dict[str, torch.Tensor], **options: Any) -> Any:
    reader = reshard.QuantizedHuggingFaceStorageReader(model, **options)
    return reshard.load(target, storage_reader=reader, no_dist=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_tensors_are_what_torch_computes(name: str, dtype: torch.dtype, model: Path) -> None:
    target = {name: torch.full(SHAPES[name], 7.0, dtype=dtype)}
    load(model, target, target_dtype=dtype)
    shape = list(SHAPES[name])
    expected = torch_reads(model, name, [0] * len(shape), shape, dtype)
    assert same_bits(target[name], expected)


def test_memory_of_another_dtype_is_filled_by_way_of_the_chosen_one(model: Path) -> None:
    target = {"wide.weight": torch.zeros(300, 200, dtype=torch.float64)}
    load(model, target, target_dtype=torch.bfloat16)
    rounded = torch_reads(model, "wide.weight", [0, 0], [300, 200], torch.bfloat16)
    assert torch.equal(target["wide.weight"], rounded.double())


@pytest.mark.parametrize("block", [7, 100, 1000])
def test_blocks_may_have_any_size(block: int, tmp_path: Path) -> None:
    model = write_model(tmp_path, block)
    target = {"wide.weight": torch.zeros(300, 200), "small.weight": torch.zeros(5, 7)}
    load(model, target, block_size=block)
    for name, tensor in target.items():
        shape = list(tensor.shape)
        expected = torch_reads(model, name, [0, 0], shape, torch.float32, block)
        assert same_bits(tensor, expected)


REGIONS = [
    ("wide.weight", [0, 0], [1, 1]),
    ("wide.weight", [127, 127], [2, 2]),
    ("wide.weight", [1, 5], [299, 190]),
    ("wide.weight", [256, 0], [44, 200]),
    ("experts_blocks", [0, 0, 0], [1, 1, 1]),
    ("experts_blocks", [1, 2, 31], [2, 3, 2]),
    ("experts_blocks", [0, 1, 33], [3, 4, 95]),
]


@pytest.mark.parametrize(("name", "offsets", "lengths"), REGIONS)
@pytest.mark.parametrize("tile", [1, 400, 1 << 20])
def test_any_region_in_pieces_of_any_size_is_what_torch_computes(
    name: str,
    offsets: list[int],
    lengths: list[int],
    tile: int,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tile == 1 and torch.Size(lengths).numel() > 1000:
        tile = 777
    monkeypatch.setattr(quantized, "_TILE_ELEMENTS", tile)
    whole = {name: torch.zeros(SHAPES[name])}

    class Cut(reshard.DefaultLoadPlanner):
        """Asks for a region only."""

        def create_local_plan(self) -> reshard.LoadPlan:
            (item,) = super().create_local_plan().items
            zeros = torch.Size([0] * len(lengths))
            item = reshard.ReadItem(
                item.type,
                item.dest_index,
                zeros,
                item.storage_index,
                torch.Size(offsets),
                torch.Size(lengths),
            )
            return reshard.LoadPlan([item])

    reader = reshard.QuantizedHuggingFaceStorageReader(model, 2)
    reshard.load(whole, storage_reader=reader, planner=Cut(), no_dist=True)
    found = whole[name][tuple(slice(0, length) for length in lengths)]
    assert same_bits(found, torch_reads(model, name, offsets, lengths, torch.float32))


def test_only_the_bytes_and_scales_of_a_region_are_read(tmp_path: Path) -> None:
    weight = torch.zeros(256, 1 << 17, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.ones(2, 1 << 10)
    save_file({"w.weight": weight, "w.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    counted: list[int] = []

    class CountingStore(LocalStore):
        def open_reader(self, key: str, ahead: int = 0, nbytes: int | None = None) -> Any:
            reader = super().open_reader(key)
            read = reader.read_into

            def read_into(offset: int, buffers: Any) -> None:
                counted.append(sum(map(len, buffers)))
                read(offset, buffers)

            reader.read_into = read_into  # type: ignore[method-assign]
            return reader

    class Counting(reshard.QuantizedHuggingFaceStorageReader):
        def open_store(self) -> LocalStore:
            return CountingStore(self.path)

        def read_data(self, plan: Any, planner: Any) -> Any:
            counted.clear()
            return super().read_data(plan, planner)

    class Cut(reshard.DefaultLoadPlanner):
        def create_local_plan(self) -> reshard.LoadPlan:
            (item,) = super().create_local_plan().items
            begin, lengths = torch.Size([130, 1000]), torch.Size([4, 1000])
            zeros = torch.Size([0, 0])
            item = reshard.ReadItem(
                item.type, item.dest_index, zeros, item.storage_index, begin, lengths
            )
            return reshard.LoadPlan([item])

    target = {"w.weight": torch.empty(256, 1 << 17, dtype=torch.uint8)}
    reshard.load(target, storage_reader=Counting(tmp_path), planner=Cut(), no_dist=True)
    # Four rows of a thousand bytes, one row of nine scales.
    assert sum(counted) == 4 * 1000 + 9 * 4


def test_plain_tensors_and_scales_are_loaded_as_they_are(model: Path) -> None:
    target = {"norm.weight": torch.zeros(9), "wide.weight_scale_inv": torch.zeros(3, 2)}
    load(model, target)
    stored = reshard.read_state_dict(model)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in target.items())


def test_a_model_without_an_index_is_read(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / INDEX).unlink()
    target = {"small.weight": torch.zeros(5, 7)}
    load(tmp_path, target)
    stored = reshard.read_state_dict(tmp_path)
    scale = stored["small.weight_scale_inv"].item()
    assert torch.equal(target["small.weight"], stored["small.weight"].float() * scale)


def test_a_single_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    weight = torch.ones(2, 2).to(torch.float8_e4m3fn)
    save_file({"w.weight": weight, "w.weight_scale_inv": torch.tensor([[3.0]])}, file)
    target = {"w.weight": torch.zeros(2, 2)}
    load(file, target)
    assert torch.equal(target["w.weight"], torch.full((2, 2), 3.0))


def test_scales_may_be_exponents(tmp_path: Path) -> None:
    groups = torch.randint(0, 256, (2, 4, 16), dtype=torch.uint8)
    exponents = torch.randint(100, 140, (2, 4), dtype=torch.uint8)
    weight = torch.ones(3, 3).to(torch.float8_e4m3fn)
    exponent = torch.tensor([[130]], dtype=torch.uint8)
    loaded = []
    for kind in (torch.uint8, torch.float8_e8m0fnu):
        tensors = {"e_blocks": groups, "e_scales": exponents.view(kind)}
        tensors |= {"w.weight": weight, "w.weight_scale_inv": exponent.view(torch.float8_e8m0fnu)}
        save_file(tensors, tmp_path / "model.safetensors")
        target = {"e_blocks": torch.zeros(2, 128), "w.weight": torch.zeros(3, 3)}
        load(tmp_path, target)
        loaded.append(target)
    assert torch.equal(loaded[0]["e_blocks"], loaded[1]["e_blocks"])
    assert torch.equal(loaded[0]["w.weight"], torch.full((3, 3), 8.0))


def test_tensors_without_memory_get_some_of_the_chosen_dtype(model: Path) -> None:
    reader = reshard.QuantizedHuggingFaceStorageReader(model, target_dtype=torch.bfloat16)
    entries = reader.read_metadata().state_dict_metadata
    assert entries["small.weight"].properties.dtype is torch.bfloat16
    state = {
        "small.weight": torch.empty(5, 7, dtype=torch.bfloat16, device="meta"),
        "norm.weight": torch.empty(9, device="meta"),
    }
    reshard.load(state, storage_reader=reader, assign=True, no_dist=True)
    expected = torch_reads(model, "small.weight", [0, 0], [5, 7], torch.bfloat16)
    assert same_bits(state["small.weight"], expected)
    assert torch.equal(state["norm.weight"], reshard.read_state_dict(model)["norm.weight"])


def test_a_reader_with_a_way_of_its_own_can_leave_the_rest_to_this_one(model: Path) -> None:
    class Own(reshard.QuantizedHuggingFaceStorageReader):
        def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
            super()._process_read_request(f, req, planner)

    target = {"small.weight": torch.zeros(5, 7), "norm.weight": torch.zeros(9)}
    reshard.load(target, storage_reader=Own(model), no_dist=True)
    assert same_bits(
        target["small.weight"], torch_reads(model, "small.weight", [0, 0], [5, 7], torch.float32)
    )
    assert target["norm.weight"].any()


def test_a_reader_that_makes_the_metadata_itself_finds_what_is_quantised(model: Path) -> None:
    class Own(reshard.QuantizedHuggingFaceStorageReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return reshard.HuggingFaceStorageReader(model).read_metadata()

        def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
            super()._process_read_request(f, req, planner)

    target = {"small.weight": torch.zeros(5, 7)}
    reshard.load(target, storage_reader=Own(model), no_dist=True)
    assert same_bits(
        target["small.weight"], torch_reads(model, "small.weight", [0, 0], [5, 7], torch.float32)
    )


def odd_models() -> dict[str, dict[str, torch.Tensor]]:
    eight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    groups = torch.zeros(2, 3, 16, dtype=torch.uint8)
    return {
        "other blocks": {"w.weight": eight, "w.weight_scale_inv": torch.ones(2, 2)},
        "not a matrix": {
            "w.weight": eight.view(2, 2, 4),
            "w.weight_scale_inv": torch.ones(1, 1, 1),
        },
        "other groups": {"w_blocks": groups, "w_scales": torch.zeros(2, 2, dtype=torch.uint8)},
        "no bytes": {"w_blocks": groups.int(), "w_scales": torch.zeros(2, 3, dtype=torch.uint8)},
    }


@pytest.mark.parametrize("odd", odd_models())
def test_what_is_quantised_in_another_way_is_refused_only_if_it_is_wanted(
    odd: str, tmp_path: Path
) -> None:
    tensors = odd_models()[odd]
    save_file({**tensors, "plain": torch.ones(1)}, tmp_path / "model.safetensors")
    load(tmp_path, {"plain": torch.zeros(1)})
    name = next(iter(tensors))
    with pytest.raises(UnsupportedFormatError, match=f"'{name}'"):
        load(tmp_path, {name: torch.zeros(tensors[name].shape)})


def test_a_scale_that_the_index_promises_and_no_file_has_is_said(tmp_path: Path) -> None:
    write_model(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["norm.weight_scale_inv"] = "model-00002-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(reshard.CheckpointException, match=r"norm\.weight_scale_inv"):
        load(tmp_path, {"norm.weight": torch.zeros(9)})


def test_arguments_that_mean_nothing_are_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="block_size"):
        reshard.QuantizedHuggingFaceStorageReader(model, block_size=0)
    with pytest.raises(MissingKeyError):
        load(model, {"experts": torch.zeros(3, 5, 128)})
