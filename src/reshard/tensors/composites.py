"""Composite tensors: those that consist of other tensors, such as quantized optimizer state.

Their parts are stored as `name / region / part` for each shard, and a description of the
tensor as `name / __tensor__`. Only the subclass knows how parts fit together, so a shard is
always read whole. If the layout has changed, the subclass itself cuts it and copies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import increment_version

from reshard.api import (
    CheckpointException,
    CoverageError,
    ShapeMismatchError,
    StateDictError,
    UnsupportedLayoutError,
)
from reshard.format.values import OpaqueValue, encode_value, is_pickled
from reshard.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from reshard.tensors.nesting import Walk
from reshard.tensors.paths import PathMap, StatePath, set_element
from reshard.tensors.shards import (
    Box,
    HeldShards,
    LocalShard,
    check_allocated,
    composite_shards,
    is_plain,
    local_shards,
    narrow,
    plain_local_tensor,
)
from reshard.tensors.subclasses import build, is_composite, join_parts, split_parts

KIND = "__tensor__"
"""The last part of the name of the entry that describes a composite tensor."""
_REGION = re.compile(r"\d{1,19}:\d{1,19}(,\d{1,19}:\d{1,19})*", re.ASCII)
_SCALAR = "all"


def region_name(box: Box) -> str:
    """A region as text: where it begins and ends in each dimension."""
    return ",".join(f"{b}:{b + n}" for b, n in zip(*box, strict=True)) or _SCALAR


def _region(name: str) -> Box | None:
    """The region that `region_name` gave the name; None if the name is not one."""
    if name == _SCALAR:
        return (), ()
    if not _REGION.fullmatch(name):
        return None
    bounds = [tuple(map(int, part.split(":"))) for part in name.split(",")]
    return tuple(b for b, _ in bounds), tuple(e - b for b, e in bounds)


def overlapping(a: Box, b: Box) -> Box | None:
    """The intersection of two regions; None if it is empty."""
    begins = tuple(map(max, zip(a[0], b[0], strict=True)))
    ends = [min(p + m, q + n) for p, m, q, n in zip(a[0], a[1], b[0], b[1], strict=True)]
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return (begins, sizes) if all(size > 0 for size in sizes) else None


# Saving


def expand_for_save(flat: dict[str, Any], paths: Mapping[str, StatePath]) -> tuple[Any, Any]:
    """A flat state dict, and its paths, with parts in place of composite tensors."""
    found = _composites(flat)
    if not found:
        return flat, paths
    expanded: dict[str, Any] = {}
    new_paths = PathMap(empties=getattr(paths, "empties", ()))
    for name, value in flat.items():
        path = paths.get(name, (name,))
        parts = _taken_apart(path, value, found[name]) if name in found else [(path, value)]
        for its_path, leaf in parts:
            its_name = ".".join(map(str, its_path))
            if its_name in expanded or (its_path != path and its_name in flat):
                raise StateDictError(
                    f"a part of the tensor {name!r} gets the name {its_name!r}, which another "
                    "value has: rename that"
                )
            expanded[its_name] = leaf
            new_paths[its_name] = its_path
    return expanded, new_paths


def refuse_composites(expanded: Mapping[str, Any]) -> None:
    """Raise for composite tensors, in a state dict that has their parts in their place."""
    for name, value in expanded.items():
        if isinstance(value, OpaqueValue) and name.endswith(f".{KIND}"):
            raise UnsupportedLayoutError(
                f"{name.removesuffix(f'.{KIND}')!r} is a {value.value[0]}, which consists of other "
                "tensors: checkpoints of DCP have no place for their parts. Save it with "
                "format='reshard', or save plain tensors, such as what it dequantizes to"
            )


def split_composites(state_dict: Mapping[str, Any]) -> Any:
    """A nested state dict with dicts of parts in place of composite tensors.

    It flattens to the names that `expand_for_save` gives, also in a process that has no mesh
    and so cannot tell which shards of a tensor this rank has.
    """
    return _CompositeSplit().run(state_dict)


class _CompositeSplit(Walk):
    def leaf(self, value: Any) -> Any:
        if type(value) is torch.Tensor or not isinstance(value, torch.Tensor):
            return value
        shards = composite_shards(".".join(map(str, self.path)), value)
        if not shards:
            return value
        parts: dict[str, Any] = {}
        for path, part in _taken_apart((), value, shards):
            set_element(parts, path, part)
        return parts


def _composites(flat: Mapping[str, Any]) -> dict[str, list[LocalShard]]:
    """The shards of each composite tensor of a state dict."""
    found = ((name, composite_shards(name, value)) for name, value in flat.items())
    return {name: shards for name, shards in found if shards}


def _taken_apart(
    path: StatePath, value: Any, shards: Sequence[LocalShard]
) -> Iterator[tuple[StatePath, Any]]:
    for shard in shards:
        for name, part in split_parts(shard.tensor)[0].items():
            below = (*path, region_name((shard.offsets, shard.sizes)), name)
            inner = composite_shards(".".join(map(str, below)), part)
            yield from _taken_apart(below, part, inner) if inner else [(below, part)]
    for shard in shards[:1]:
        yield (*path, KIND), _description(shard.tensor, value)


def _description(local: Any, value: Any) -> OpaqueValue:
    _, context = split_parts(local)
    # A context that could only be pickled is not stored. It is needed only to load without a
    # tensor of the same kind.
    known = not is_pickled(encode_value(context))
    shape, own = tuple(value.size()), tuple(local.size())
    return OpaqueValue((_class_name(type(local)), shape, known, context if known else None, own))


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# What is stored


@dataclass
class StoredShards:
    """The shards of one composite tensor in a checkpoint, with the parts of each by name."""

    shards: dict[Box, dict[str, TensorStorageMetadata | None]] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        ends = [tuple(map(sum, zip(*box, strict=True))) for box in self.shards]
        return tuple(map(max, zip(*ends, strict=True)))

    @property
    def has_sharded_parts(self) -> bool:
        """Whether a part was stored by several ranks: then the parts were sharded."""
        parts = (part for shard in self.shards.values() for part in shard.values())
        return any(part is not None and len(part.chunks) > 1 for part in parts)

    def needed_for(self, name: str, wanted: Box) -> dict[Box, Box]:
        """The shards that overlap a region, and where they do."""
        if wanted in self.shards or not all(wanted[1]):
            return {wanted: wanted} if wanted in self.shards else {}
        needed = {box: common for box in self.shards if (common := overlapping(box, wanted))}
        if sum(math.prod(common[1]) for common in needed.values()) != math.prod(wanted[1]):
            raise CoverageError(
                f"the checkpoint does not hold all of {name!r} in {region_name(wanted)}"
            )
        return needed

    def empty_parts(
        self, name: str, box: Box, device: torch.device | None = None
    ) -> dict[str, torch.Tensor]:
        """Memory for the parts of a shard."""
        parts = {}
        for part, entry in self.shards[box].items():
            if entry is None:
                raise ShapeMismatchError(
                    f"{name!r} has parts that have parts themselves: it can only be loaded into a "
                    "tensor of the same kind, in the layout that it was saved with"
                )
            parts[part] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        return parts


def stored_shards(metadata: Metadata) -> dict[str, StoredShards]:
    """All composite tensors of a checkpoint by name."""
    entries = metadata.state_dict_metadata
    ending = f".{KIND}"
    found = {
        name.removesuffix(ending): StoredShards()
        for name, entry in entries.items()
        if name.endswith(ending) and isinstance(entry, BytesStorageMetadata)
    }
    for name, entry in entries.items() if found else ():
        pieces = name.split(".")
        for depth in range(1, len(pieces) - 1):
            box = _region(pieces[depth])
            owner = found.get(".".join(pieces[:depth])) if box is not None else None
            if owner is not None and box is not None:
                plain = depth == len(pieces) - 2 and isinstance(entry, TensorStorageMetadata)
                parts = owner.shards.setdefault(box, {})
                parts[pieces[depth + 1]] = entry if plain else None  # type: ignore[assignment]
    return {name: shards for name, shards in found.items() if shards.shards}


# Loading into tensors that are there


@dataclass
class _Copy:
    """A region of a stored tensor that is copied into a region of a target.

    The target, the source or both consist of other tensors: a class that quantizes may do so
    only where a shard is large enough, which depends on the layout.
    """

    name: str
    target: torch.Tensor
    into: Box
    out_of: Box
    sizes: tuple[int, ...]
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the source consists of."""
    description: Sequence[Any] | None = None
    """What is stored about the source; None if the target is of the same kind."""
    plain: torch.Tensor | None = None
    """The source, if it does not consist of others."""

    def try_out(self) -> None:
        """Raise early if the subclass does not support the operations of `run`."""
        target = self.target
        if is_composite(target):
            parts = {name: torch.empty_like(part) for name, part in split_parts(target)[0].items()}
            self._run(join_parts(target, parts))
        else:
            self._run(torch.empty_like(target))

    def run(self) -> None:
        """Copy, with the operations of the subclass."""
        self._run(self.target)

    def _run(self, target: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                narrow(target, self.into).copy_(narrow(self._source(), self.out_of))
        except Exception as error:
            raise self._problem(f"{type(error).__name__}: {error}") from error

    def _problem(self, why: str) -> ShapeMismatchError:
        kind = type(self.target).__name__
        if self.plain is not None:
            return ShapeMismatchError(
                f"{self.name!r} was saved as one tensor, and a {kind} cannot be filled from that: "
                f"{why}. Load it into a plain tensor and convert that"
            )
        if self.description is not None:
            return ShapeMismatchError(
                f"{self.name!r} was saved as a {self.description[0]}, and a plain tensor cannot be "
                f"filled from that: {why}. Load it into a tensor of the same kind"
            )
        return ShapeMismatchError(
            f"{self.name!r} was saved in another layout, and a {kind} cannot be cut for this one: "
            f"{why}. Load it in the layout it was saved with"
        )

    def _source(self) -> Any:
        if self.plain is not None:
            return self.plain
        if self.description is None:
            return join_parts(self.target, self.parts, self.sizes)
        kind, context, shapes = _described(self.name, self.description)
        return build(kind, self.parts, context, self.sizes, shapes)


def _within(box: Box, frame: Box) -> Box:
    """The same region, relative to a region around it."""
    return tuple(a - b for a, b in zip(box[0], frame[0], strict=True)), box[1]


class CompositeTargets:
    """The tensors that a load fills and that consist of others, here or in the checkpoint."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []
        self._undescribed: dict[str, list[_Copy]] = {}
        """Copies into plain tensors, by the name of the description that they wait for."""
        self._filled: list[torch.Tensor] = []
        self._kinds: dict[str, str | None] = {}
        """The classes of composite tensors by the name of their description; None if plain."""
        self.covers: tuple[str, ...] = ()
        """Prefixes of the names of everything that is stored of these tensors."""

    def expand(
        self, flat: dict[str, Any], metadata: Metadata, leave: Callable[[str], bool]
    ) -> dict[str, Any]:
        """A flat state dict with what is stored in place of tensors that consist of others.

        Tensors that `leave` chooses, and those that are not stored, stay as they are.
        """
        entries = metadata.state_dict_metadata
        found = _composites(flat)
        plain = {
            name: list(local_shards(name, value))
            for name, value in flat.items()
            if (is_plain(value) or plain_local_tensor(value) is not None)
            and name not in entries
            and f"{name}.{KIND}" in entries
        }
        if not found and not plain:
            return flat
        stored = stored_shards(metadata)
        expanded: dict[str, Any] = {}
        for name, value in flat.items():
            shards = found.get(name, plain.get(name))
            if shards is None or leave(name):
                self.covers += (f"{name}.",) if shards is not None else ()
                expanded[name] = value
            elif name in stored:
                _check_shape(name, value, stored[name].shape)
                self.covers += (f"{name}.",)
                self._note(value)
                kind = _class_name(type(shards[0].tensor)) if name in found else None
                self._kinds[f"{name}.{KIND}"] = kind
                expanded[f"{name}.{KIND}"] = None
                parts = self._parts(name, shards, stored[name])
                # Parts may be composite tensors themselves.
                expanded |= self.expand(parts, metadata, leave)
            elif isinstance(entry := entries.get(name), TensorStorageMetadata):
                _check_shape(name, value, tuple(entry.size))
                self._note(value)
                expanded[name] = self._unsplit(name, shards, entry)
            else:
                expanded[name] = value
        return expanded

    def _note(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._filled.append(value)

    def _parts(
        self, name: str, shards: Sequence[LocalShard], stored: StoredShards
    ) -> dict[str, Any]:
        """Memory for the parts of stored shards that fill shards here."""
        wanted: dict[str, Any] = {}
        for shard in shards:
            own = (shard.offsets, shard.sizes)
            same_kind = is_composite(shard.tensor)
            for box, common in stored.needed_for(name, own).items():
                below = f"{name}.{region_name(box)}"
                if box == own and same_kind:
                    parts, _ = split_parts(shard.tensor)
                    wanted |= {f"{below}.{part}": tensor for part, tensor in parts.items()}
                    continue
                temporary = stored.empty_parts(name, box, _device(shard.tensor))
                for part in temporary:
                    temporary[part] = wanted.setdefault(f"{below}.{part}", temporary[part])
                copy = _Copy(
                    name,
                    shard.tensor,
                    _within(common, own),
                    _within(common, box),
                    box[1],
                    temporary,
                )
                self._copies.append(copy)
                if same_kind:
                    copy.try_out()
                else:
                    check_allocated(name, shard.tensor)
                    self._undescribed.setdefault(f"{name}.{KIND}", []).append(copy)
        return wanted

    def _unsplit(
        self, name: str, shards: Sequence[LocalShard], entry: TensorStorageMetadata
    ) -> HeldShards:
        """Memory for regions of a stored tensor that fill composite shards here."""
        dtype = entry.properties.dtype
        held = []
        for shard in shards:
            plain = torch.empty(shard.sizes, dtype=dtype, device=_device(shard.tensor))
            held.append(LocalShard(shard.offsets, shard.sizes, plain))
            whole = ((0,) * len(shard.sizes), shard.sizes)
            copy = _Copy(name, shard.tensor, whole, whole, shard.sizes, plain=plain)
            copy.try_out()
            self._copies.append(copy)
        return HeldShards(dtype, tuple(entry.size), False, tuple(held))

    def takes(self, name: str, value: Any) -> bool:
        """Whether a loaded value describes a composite tensor here; checks it if so."""
        if name not in self._kinds:
            return False
        self.check(name, value)
        return True

    def check(self, name: str, value: Any) -> None:
        """Raise if a stored description does not fit the tensor here."""
        stored, kind = value[0][0], self._kinds.get(name)
        whose = name.removesuffix(f".{KIND}")
        if kind is None:
            # There is no tensor of that kind yet: its class is needed to make one.
            _find_class(whose, stored)
            for copy in self._undescribed.pop(name, ()):
                copy.description = value[0]
                copy.try_out()
        elif stored != kind:
            raise ShapeMismatchError(f"{whose!r} was saved as a {stored}, but is a {kind} here")

    def finish(self) -> None:
        """Fill tensors that could not be filled in place. Called when everything is read."""
        for copy in self._copies:
            copy.run()
        # Autograd does not count changes of the parts as changes of the tensor.
        increment_version(self._filled)
        self._copies, self._filled = [], []


def _check_shape(name: str, value: Any, stored: tuple[int, ...]) -> None:
    shape = tuple(value.size())
    if stored != shape:
        raise ShapeMismatchError(f"{name!r} has shape {shape}, but was saved with {stored}")


def _device(tensor: Any) -> torch.device:
    """The device of the tensors that a tensor consists of, or its own."""
    device: torch.device = tensor.device
    if is_composite(tensor):
        device = next(iter(split_parts(tensor)[0].values())).device
    return device


# Loading where there is no tensor yet


def assemble(name: str, loaded: Mapping[str, Any], wanted: Box) -> Any:
    """Build a composite tensor from loaded parts, cut to a region.

    `loaded` has the parts of each shard under the name of its region, and the description.
    """
    kind, context, shapes = _described(name, loaded[KIND][0])
    class_name = _class_name(kind)
    pieces: dict[Box, Any] = {}
    try:
        for region, parts in loaded.items():
            box = _region(region)
            common = None if box is None else (box if box == wanted else overlapping(box, wanted))
            if box is not None and common is not None:
                whole = build(kind, parts, context, box[1], shapes)
                pieces[common] = narrow(whole, _within(common, box))
                if common != box:
                    # A view would keep the whole shard in memory.
                    own = {n: part.clone() for n, part in split_parts(pieces[common])[0].items()}
                    pieces[common] = join_parts(pieces[common], own)
        if not pieces and not all(wanted[1]):
            # Of what this rank holds nothing of, no class can be told to make nothing.
            return torch.empty(wanted[1], device="cpu")
        return pieces[wanted] if wanted in pieces else _concatenated(pieces, wanted)
    except Exception as error:
        raise CheckpointException(
            f"{name!r}, a {class_name}, was saved in another layout, and cannot be put together "
            f"for this one ({type(error).__name__}: {error}). Load it in the layout that it was "
            "saved with, or into an optimizer that has its state already"
        ) from error


def _described(name: str, description: Sequence[Any]) -> tuple[Any, Any, list[tuple[int, ...]]]:
    """The class of a stored tensor, the context of a shard, and the shape of that shard."""
    class_name, _, known, context, *shapes = description
    kind = _find_class(name, class_name)
    if not known:
        raise CheckpointException(
            f"{name!r} is a {class_name} with attributes that could not be stored safely: load it "
            "into a tensor of the same kind"
        )
    return kind, context, shapes


def _concatenated(pieces: Mapping[Box, Any], wanted: Box) -> Any:
    """Concatenate pieces along the first dimension.

    Parts that shrink when the subclass is cut to fewer rows are concatenated; others belong
    to the tensor as a whole.
    """
    end = wanted[0][0]
    for offsets, sizes in sorted(pieces):
        if offsets[0] != end or (offsets[1:], sizes[1:]) != (wanted[0][1:], wanted[1][1:]):
            raise ValueError("it was cut in another dimension than the first")
        end += sizes[0]
    in_order = [pieces[box] for box in sorted(pieces)]
    first = in_order[0]
    fewer, _ = split_parts(first.narrow(0, 0, len(first) // 2))
    whole, _ = split_parts(first)
    by_rows = {part for part in whole if whole[part].shape != fewer[part].shape}
    others = [split_parts(piece)[0] for piece in in_order]
    parts = {
        part: torch.cat([each[part] for each in others]) if part in by_rows else tensor
        for part, tensor in whole.items()
    }
    return join_parts(first, parts, wanted[1])


def _find_class(name: str, class_name: str) -> Any:
    """Find a tensor subclass that is already imported. Checkpoints cannot cause imports."""
    waiting: list[type] = [torch.Tensor]
    while waiting:
        kind = waiting.pop()
        if _class_name(kind) == class_name and hasattr(kind, "__tensor_unflatten__"):
            return kind
        waiting += kind.__subclasses__()
    raise CheckpointException(
        f"{name!r} is a {class_name}, a tensor subclass that this program does not have: import "
        "it before the load"
    )
