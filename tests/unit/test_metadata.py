"""Properties of tensors, as they are pickled and as newer torch has them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as theirs

from reshard.default_planner import create_default_local_save_plan
from reshard.metadata import _MEM_FORMAT_ENCODING, TensorProperties

FORMATS = [torch.contiguous_format, torch.channels_last, torch.preserve_format]


@pytest.mark.parametrize("memory_format", [*FORMATS, torch.channels_last_3d])
@pytest.mark.parametrize("strides", [None, (3, 1)])
def test_properties_survive_pickling(
    memory_format: torch.memory_format, strides: tuple[int, ...] | None
) -> None:
    properties = TensorProperties(torch.int8, torch.strided, True, memory_format, True, strides)
    assert vars(pickle.loads(pickle.dumps(properties))) == vars(properties)
    assert vars(copy.deepcopy(properties)) == vars(properties)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_the_state_of_properties_is_that_of_dcp(memory_format: torch.memory_format) -> None:
    state = TensorProperties(torch.int8, memory_format=memory_format).__getstate__()
    expected = theirs.TensorProperties(torch.int8, memory_format=memory_format).__getstate__()
    assert len(state) == 5, "older torch takes no more"
    assert [getattr(field, "name", field) for field in state] == [
        getattr(field, "name", field) for field in expected[:5]
    ]
    restored: Any = TensorProperties.__new__(TensorProperties)
    restored.__setstate__(expected)
    assert (restored.dtype, restored.memory_format) == (torch.int8, memory_format)


def test_strides_are_a_sixth_field_of_the_state() -> None:
    properties = TensorProperties(torch.int8, strides=(4, 1))
    assert properties.__getstate__()[5] == (4, 1)
    restored: Any = TensorProperties.__new__(TensorProperties)
    restored.__setstate__(properties.__getstate__())
    assert restored.strides == (4, 1)


@pytest.mark.parametrize("encoded", ["uint8", "TORCH_NONE", 7])
def test_a_state_with_no_memory_format_is_refused(encoded: Any) -> None:
    blank = TensorProperties.__new__(TensorProperties)
    with pytest.raises(ValueError, match="memory_format"):
        blank.__setstate__((torch.int8, torch.strided, False, encoded, False))
    with pytest.raises(ValueError, match="5 or 6 fields"):
        blank.__setstate__((torch.int8,))


def test_properties_of_a_tensor_say_how_it_lies_in_memory() -> None:
    turned = torch.zeros(2, 3).T
    assert TensorProperties.create_from_tensor(turned).strides == (1, 3)
    sparse = torch.eye(2).to_sparse()
    assert TensorProperties.create_from_tensor(sparse).strides is None


def test_properties_of_a_planned_tensor_equal_those_of_the_tensor() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.int8)
    planned = create_default_local_save_plan({"w": tensor}, True).items[0].tensor_data
    assert planned is not None
    assert planned.properties == TensorProperties.create_from_tensor(tensor)


def test_values_without_strides_have_properties_as_well() -> None:
    class Table:
        dtype, layout, requires_grad = torch.int8, torch.strided, False

        def is_pinned(self) -> bool:
            return False

    properties = TensorProperties.create_from_tensor(Table())  # type: ignore[arg-type]
    assert properties == TensorProperties(torch.int8)


def test_the_encoding_of_memory_formats_is_that_of_dcp() -> None:
    ours = {member.name: member.value for member in _MEM_FORMAT_ENCODING}
    assert ours == {member.name: member.value for member in theirs._MEM_FORMAT_ENCODING}
