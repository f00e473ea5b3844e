"""Sessions to save, and what their folders hold."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from k3offload.engine import Engine
from k3offload.session import Session
from k3offload.session_manifest import MANIFEST
from tests.helpers_engine import Logits, session_with, some_tokens

A, B = some_tokens(300, 1), some_tokens(75, 2)
REPLY = some_tokens(6, 3)


def decode(session: Session, tokens: list[int]) -> Logits:
    """The logits after each of ``tokens``, fed as if sampled."""
    session.logits()
    rows = []
    for token in tokens:
        session.append_sampled(token)
        rows.append(session.logits())
    return np.stack(rows)


def one_file(path: Path, name: str) -> Path:
    """The file ``name`` of the save in folder ``path``."""
    (place,) = path.glob(f"save-*/{name}")
    return place


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and give it the checksum that it then has."""
    content = json.loads((path / MANIFEST).read_bytes())
    del content["crc32"]
    change(content)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["crc32"] = zlib.crc32(text.encode())
    (path / MANIFEST).write_text(json.dumps(content, sort_keys=True, separators=(",", ":")))


def save_reply(engine: Engine, path: Path) -> Path:
    """A with a reply decoded, its last token not computed yet, saved to ``path``."""
    with session_with(engine, A) as session:
        decode(session, REPLY)
        session.append_sampled(9)
        session.save(path)
    return path
