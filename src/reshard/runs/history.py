"""One line for each save of a run, as JSON, in `history.jsonl`."""

from __future__ import annotations

import json
import time
from typing import Any

from reshard.runs.small_files import read_small, replace_small
from reshard.stores.protocol import Store

HISTORY = "history.jsonl"


class History:
    """The lines so far. The file is rewritten as a whole, since object stores cannot append."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._text: bytes | None = None

    def append(self, record: dict[str, Any]) -> None:
        if self._text is None:
            self._text = read_small(self._store, HISTORY) or b""
            if self._text and not self._text.endswith(b"\n"):
                self._text += b"\n"
        line = {"time": round(time.time(), 3), **record}
        self._text += json.dumps(line).encode() + b"\n"
        replace_small(self._store, HISTORY, self._text)
