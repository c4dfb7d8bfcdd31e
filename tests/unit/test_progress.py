"""Progress is shown to a person who waits, and to nobody else."""

from __future__ import annotations

import io
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress as Bar

from reshard.engine import progress
from reshard.engine.progress import Progress, watched


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_bar(file: Terminal) -> Bar:
    return Bar(console=Console(file=file, width=200))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    # Not sys.stderr itself, which pytest replaces before the test runs.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found))
    monkeypatch.setattr(progress, "_make_bar", lambda: make_bar(found))
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.delenv("RESHARD_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return found


def test_a_person_at_a_terminal_sees_what_is_going_on(terminal: Terminal) -> None:
    with watched("saving step-1", 1000, is_coordinator=True) as shown:
        shown.advance(500)
    assert "saving step-1" in terminal.getvalue()


def test_what_is_done_within_the_patience_of_a_person_shows_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 3600.0)
    with watched("saving step-1", 1000, is_coordinator=True) as shown:
        shown.advance(1000)
    assert terminal.getvalue() == ""


def test_only_the_coordinator_shows_a_line(terminal: Terminal) -> None:
    with watched("saving step-1", 1000, is_coordinator=False) as shown:
        shown.advance(500)
    assert terminal.getvalue() == ""


def test_a_background_thread_shows_no_line(terminal: Terminal) -> None:
    def work() -> None:
        with watched("saving step-1", 1000, is_coordinator=True) as shown:
            shown.advance(500)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert terminal.getvalue() == ""


def test_the_environment_can_turn_it_off(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESHARD_PROGRESS", "0")
    with watched("saving step-1", 1000, is_coordinator=True) as shown:
        shown.advance(500)
    assert terminal.getvalue() == ""


def test_without_a_terminal_a_long_save_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "_LOG_SECONDS", 0.0)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=io.StringIO()))
    with (
        caplog.at_level(logging.INFO, "reshard.engine.progress"),
        watched("saving step-1", 1000, is_coordinator=True) as shown,
    ):
        shown.advance(500)
    assert caplog.messages == ["saving step-1: 50 % of 1000 bytes"]


def test_bytes_from_several_threads_are_all_counted() -> None:
    counted = Progress("saving", 10_000, on_terminal=False)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(counted.advance, [1] * 10_000))
    assert counted._done_bytes == 10_000
