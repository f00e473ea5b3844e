"""Model folders that hold tokenizer files and nothing else."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import k3offload.tokenizer as module

NANO = Path(module.__file__).parent / "nano"


@dataclass(frozen=True)
class Spec:
    vocab: int
    bos: int | None = None
    eos: tuple[int, ...] = ()


def rank_lines(tokens: list[bytes]) -> list[str]:
    return [f"{base64.b64encode(t).decode()} {i}" for i, t in enumerate(tokens)]


SINGLE = [bytes([b]) for b in range(256)]


def make_folder(folder: Path, tokens: list[bytes] = SINGLE, **files: Any) -> Path:
    """A model folder with a rank file and JSON files given by their stem."""
    (folder / "tiktoken.model").write_text("\n".join(rank_lines(tokens)) + "\n")
    for stem, value in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder
