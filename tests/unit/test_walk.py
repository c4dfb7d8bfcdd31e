"""docs/design/walk.md names only what exists, in the order in which the code does it."""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import reshard
from reshard.state_dict_saver import AsyncCheckpointerType

ROOT = Path(reshard.__file__).parent
WALK = Path(__file__).parents[2] / "docs" / "design" / "walk.md"
HOP = re.compile(r"^ *\d+\. `([\w/]+)\.([\w.]+)`", re.MULTILINE)
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)


def walks() -> dict[str, list[tuple[str, str]]]:
    """The hops of each walk: a file below src/reshard, without its ending, and what is in it."""
    _, *parts = SECTION.split(WALK.read_text())
    found = {
        title: [(file, name) for file, name in HOP.findall(text)]
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {title: hops for title, hops in found.items() if hops}


def names_in(path: Path) -> set[str]:
    """The qualified names of all functions and classes of a module."""

    def walk(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                yield prefix + child.name
                yield from walk(child, f"{prefix}{child.name}.")

    return set(walk(ast.parse(path.read_text()), ""))


def test_there_are_three_walks_and_each_is_long_enough_to_be_one() -> None:
    assert [*walks()] == ["A save", "A load", "A save in a process"]
    assert all(len(hops) >= 10 for hops in walks().values())


@pytest.mark.parametrize("title", walks())
def test_every_hop_exists(title: str) -> None:
    missing = [
        f"{file}.{name}"
        for file, name in walks()[title]
        if not (ROOT / f"{file}.py").is_file() or name not in names_in(ROOT / f"{file}.py")
    ]
    assert missing == []


@contextmanager
def recorded(called: list[tuple[str, str]]) -> Iterator[None]:
    """Note every function of the package that begins, in any thread, by file and name."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            file = Path(frame.f_code.co_filename).relative_to(ROOT).with_suffix("")
            called.append((str(file), frame.f_code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def out_of_order(hops: list[tuple[str, str]], called: list[tuple[str, str]]) -> list[str]:
    """The hops that do not begin after the hop before them."""
    wrong, position = [], 0
    for hop in hops:
        try:
            position = called.index(hop, position) + 1
        except ValueError:
            wrong.append(".".join(hop))
    return wrong


def in_the_trainer(hops: list[tuple[str, str]]) -> list[tuple[str, str]]:
    begins = next(i for i, (file, _) in enumerate(hops) if file.endswith("worker_main"))
    return hops[:begins]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs co_qualname")
@pytest.mark.parametrize("title", walks())
def test_hops_are_in_the_order_of_the_code(title: str, tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0), "step": 3}
    called: list[tuple[str, str]] = []
    hops = walks()[title]
    if title == "A save":
        with recorded(called):
            reshard.save(state, checkpoint_id=tmp_path)
    elif title == "A load":
        reshard.save(state, checkpoint_id=tmp_path)
        with recorded(called):
            reshard.load(state, checkpoint_id=tmp_path)
    else:
        hops = in_the_trainer(hops)
        with recorded(called):
            future = reshard.async_save(
                state,
                checkpoint_id=tmp_path,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            future.result()
        reshard.close()
    assert out_of_order(hops, called) == []
