"""Events of saves and loads, for those who listen to DCP's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.logger as dcp_logger
from torch.distributed import logging_handlers

import reshard
from reshard import logger as ours
from reshard.tensors.event_logger import event_logger


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.msg, dict)
        self.events.append(record.msg)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["func_name"] == name]

    def order(self) -> list[tuple[str, str]]:
        return [(event["func_name"], event["event"]) for event in self.events]


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Listens where telemetry for DCP does."""
    handler, logger = Listener(), dcp_logger._dcp_logger
    logger.addHandler(handler)
    # Otherwise it is off in tests, where pytest listens to all loggers.
    logger.disabled = False
    yield handler
    logger.disabled = True
    logger.removeHandler(handler)


def around(*steps: str) -> list[tuple[str, str]]:
    return [(step, event) for step in steps for event in ("start", "end")]


def test_both_libraries_log_to_one_logger() -> None:
    assert ours._dcp_logger is dcp_logger._dcp_logger


def test_a_save_and_a_load_log_the_steps_that_dcp_logs(tmp_path: Path, listener: Listener) -> None:
    state = {"w": torch.ones(3)}
    reshard.save(state, checkpoint_id=tmp_path / "c")
    asked = around("_stateful_to_state_dict")
    planned = [("local_step", "start"), *asked, ("local_step", "end")]
    assert listener.order() == [
        ("save", "start"),
        *planned,
        *around("global_step", "write_data", "finish_checkpoint"),
        ("save", "end"),
    ]
    assert {event["checkpoint_id"] for event in listener.named("save")} == {str(tmp_path / "c")}
    assert {event["checkpoint_id"] for event in listener.named("write_data")} == {
        str(tmp_path / "c")
    }
    listener.events.clear()
    reshard.load(state, checkpoint_id=tmp_path / "c")
    steps = around("local_step", "global_step", "read_data")
    assert listener.order() == [("load", "start"), *steps, ("load", "end")]


def test_a_save_without_collectives_logs_the_same_steps(tmp_path: Path, listener: Listener) -> None:
    reshard.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c", use_collectives=False)
    steps = ("local_step", "global_step", "write_data", "finish_checkpoint")
    assert [pair for pair in listener.order() if pair[0] in steps] == around(*steps)


def test_the_end_of_a_call_has_its_id_and_says_how_long_it_took(
    tmp_path: Path, listener: Listener
) -> None:
    writer = reshard.FileSystemWriter(tmp_path / "c")
    planner = reshard.DefaultSavePlanner()
    reshard.save({"w": torch.ones(3)}, storage_writer=writer, planner=planner)
    begin, end = listener.named("save")
    assert begin["uuid"] == end["uuid"]
    assert "times_spent" not in begin
    assert 0 < end["times_spent"] == end["time"] - begin["time"]
    assert end["storage_writer"] == "FileSystemWriter"
    assert end["planner"] == "DefaultSavePlanner"
    assert end["checkpoint_id"] == str(tmp_path / "c")


def test_a_background_save_logs_its_staging_and_the_save_itself(
    tmp_path: Path, listener: Listener
) -> None:
    reshard.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c").result()  # type: ignore[union-attr]
    ends = [name for name, event in listener.order() if event == "end"]
    assert {"async_save", "stage_state_dict", "maybe_synchronize_staging"} <= {*ends}
    assert {"save", "local_step", "write_data", "finish_checkpoint"} <= {*ends}


def test_a_failure_is_an_event_of_its_own(tmp_path: Path, listener: Listener) -> None:
    with pytest.raises(reshard.CheckpointException):
        reshard.load({"w": torch.ones(3)}, checkpoint_id=tmp_path / "none")
    assert listener.order() == [("load", "start"), ("load", "exception")]
    assert "no checkpoint" in listener.events[-1]["error"]
    assert listener.events[-1]["log_exceptions"]


def test_nothing_is_collected_while_nobody_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = []
    monkeypatch.setattr(ours, "_get_msg_dict", lambda name, **_: described.append(name) or {})
    # Without those of pytest.
    monkeypatch.setattr(ours._dcp_logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(ours._dcp_logger, "disabled", False)
    reshard.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    assert described == []


def test_events_below_the_level_of_the_logger_are_left_out(listener: Listener) -> None:
    before = ours._dcp_logger.level
    ours._dcp_logger.setLevel(logging.ERROR)
    try:
        with pytest.raises(ZeroDivisionError), ours.logged("divide", log_exceptions=True):
            _ = 1 / 0
    finally:
        ours._dcp_logger.setLevel(before)
    assert listener.order() == [("divide", "exception")]


def test_the_decorator_takes_what_it_logs_from_the_call_and_from_itself(
    listener: Listener,
) -> None:
    @ours._dcp_method_logger(checkpoint_id="a")
    def step(value: int, checkpoint_id: str | None = None) -> int:
        """Its own words."""
        return value + 1

    assert (step(1), step.__name__, step.__doc__) == (2, "step", "Its own words.")
    assert step(1, checkpoint_id="b") == 2
    assert [event["checkpoint_id"] for event in listener.events] == ["a", "a", "b", "b"]


def test_a_message_says_the_same_as_that_of_dcp() -> None:
    arguments = {"checkpoint_id": Path("a"), "planner": reshard.DefaultSavePlanner()}
    theirs = dcp_logger._get_msg_dict("save", **arguments)
    mine = ours._get_msg_dict("save", **arguments)
    assert mine | {"uuid": ""} == theirs | {"uuid": ""}
    assert mine["uuid"] != theirs["uuid"]


def test_the_root_logger_is_set_up_to_show_the_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "logger", logging.Logger("root"))
    ours._init_logger(3)
    ours.logger.info("saved")
    assert capsys.readouterr().err.startswith("[3] ")


def test_a_handler_that_is_registered_with_torch_hears_the_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As telemetry does before the first import of the logger.
    handler = Listener()
    monkeypatch.setitem(logging_handlers._log_handlers, "dcp_logger", handler)
    monkeypatch.setattr(ours, "_dcp_logger", event_logger())
    with ours.logged("step"):
        pass
    ours._dcp_logger.removeHandler(handler)
    assert handler.order() == [("step", "start"), ("step", "end")]
