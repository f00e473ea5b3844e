"""k3offload: run Kimi K3 on one ordinary workstation, exactly, inside a memory budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .choose_label import score_labels
    from .constrain import Grammar
    from .documents import Document, read_documents
    from .engine import Engine
    from .loading import load
    from .sampling import Sampling
    from .session import Session

__version__ = "0.1.0"
__all__ = [
    "Document", "Engine", "Grammar", "Sampling", "Session", "__version__", "load",
    "read_documents", "score_labels",
]  # fmt: skip

_HOME = {
    "Document": ".documents",
    "Engine": ".engine",
    "Grammar": ".constrain",
    "load": ".loading",
    "read_documents": ".documents",
    "Sampling": ".sampling",
    "Session": ".session",
    "score_labels": ".choose_label",
}


def __getattr__(name: str) -> Any:
    """Public names are imported at first use, so that ``inspect`` and ``check`` need no torch."""
    if name in _HOME:
        return getattr(import_module(_HOME[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
