"""Paths as people meet them: odd names, links, hub caches, shards spread over several folders.

This file knows the file system and nothing of models.  It opens nothing and writes nothing.
"""

from __future__ import annotations

import os
from pathlib import Path


def show_path(path: str | os.PathLike[str]) -> str:
    """``path`` as text that can always be printed: bytes that are not UTF-8 become ``\\xNN``."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def link_target(path: Path) -> Path:
    """Where the link ``path`` points, one step; ``path`` itself when it is no link."""
    try:
        return Path(os.path.normpath(path.parent / os.readlink(path)))
    except OSError:
        return path
