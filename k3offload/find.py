"""From what a person types as MODEL to a folder: a path, the embedded model, or a hub id.

Hub ids are looked up in the local hub cache only (``HF_HUB_CACHE``, ``HF_HOME``); nothing is
downloaded and no name is looked up on a network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import UsageError
from .paths import show_path

EMBEDDED = "nano"


def find_model(name: str | os.PathLike[str]) -> Path:
    """The folder of ``name``.  Raises ``UsageError`` if there is none."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    text = os.fspath(name)
    if text == EMBEDDED:
        return Path(__file__).parent / EMBEDDED
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not folder.exists():
        return _in_hub_cache(text)
    raise UsageError(
        f"{show_path(folder)} is not a folder.",
        f"Give the folder that holds config.json, or {EMBEDDED!r} for the embedded model.",
    )


def hub_cache() -> Path:
    """Where the hub's tools keep downloaded models on this machine."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"


def _in_hub_cache(model: str) -> Path:
    place = hub_cache() / f"models--{model.replace('/', '--')}"
    main = place / "refs" / "main"
    if main.is_file():
        snapshot = place / "snapshots" / main.read_text().strip()
        if snapshot.is_dir():
            return snapshot
    raise UsageError(
        f"{model} is neither a folder nor a model in the hub cache {show_path(hub_cache())}.",
        f"Download it first (huggingface-cli download {model}), or give its folder.",
    )
