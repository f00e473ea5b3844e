"""Routing that other engines wrote down, as a trace: CSV or JSONL, one line a token and layer.

CSV has the header ``sequence,position,layer,experts`` (columns in any order, others are ignored),
experts parted by spaces; a line of JSONL is an object with these four keys, experts a list.  Lines
of one token stand together, tokens in the order in which they ran, each with the same layers and
as many experts in each.  Nobody knows scores then, so none are made up: all codes are 128.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from .errors import UsageError
from .paths import show_path
from .scheduler.hints import CHOSEN
from .trace import Trace
from .trace_made import plain

MOST = 1 << 16  #: experts of a layer, and layers
COLUMNS = ("sequence", "position", "layer", "experts")


def import_trace(path: str | Path, experts: int | None = None, page_bytes: int = 1) -> Trace:
    """The trace in a CSV or JSONL file.  ``experts`` of a layer: as many as the highest number
    shows, if it is None.  Raises ``UsageError`` naming the line."""
    path = Path(path)
    layers: list[int] = []
    tokens = array("q")  # sequence and position of each
    chosen = array("H")
    top_k = 0
    last: tuple[int, int] | None = None
    place = number = 0
    for number, (sequence, position, layer, some) in _lines(path):
        if last != (sequence, position):
            if last is not None and place != len(layers):
                _refuse(path, number, f"the token before it has {place} layers of {len(layers)}")
            first, last, place = last is None, (sequence, position), 0
            tokens.extend(last)
        if first:
            if layer in layers or (layers and layer < layers[-1]):
                _refuse(path, number, f"layer {layer} comes after {layers[-1]}")
            layers.append(layer)
            top_k = top_k or len(some)
        elif place >= len(layers) or layer != layers[place]:
            _refuse(path, number, f"layer {layer} is not the one that the first token has there")
        if len(some) != top_k or len(set(some)) != top_k:
            _refuse(path, number, f"it has not {top_k} different experts, as the first line has")
        chosen.extend(some)
        place += 1
    if not layers or place != len(layers):
        _refuse(path, number, "the last token lacks layers" if layers else "it holds no routing")
    best = np.frombuffer(chosen, np.uint16).reshape(-1, len(layers), top_k)
    count = int(best.max()) + 1 if experts is None else experts
    if best.max() >= count:
        raise UsageError(f"{show_path(path)} names expert {best.max()}.", "Raise --experts.")
    who = np.frombuffer(tokens, np.int64).reshape(-1, 2)
    return plain(
        np.array(layers), count, top_k, best, np.full_like(best, CHOSEN, np.uint8),
        who[:, 0], who[:, 1], page_bytes=page_bytes, source=f"import of {path.name}",
    )  # fmt: skip


def _lines(path: Path) -> Iterator[tuple[int, tuple[int, int, int, list[int]]]]:
    """Numbers of lines, and what they say."""
    number = 0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if path.suffix.lower() == ".csv":
                reader = csv.DictReader(file)
                for row in reader:
                    number = reader.line_num
                    yield number, _checked(dict(row, experts=(row["experts"] or "").split()))
            else:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield number, _checked(json.loads(line))
    except KeyError as error:
        _refuse(path, number, f"it has no {error.args[0]!r}, one of {', '.join(COLUMNS)}")
    except (ValueError, TypeError, csv.Error, RecursionError) as error:
        _refuse(path, number, str(error))


def _checked(row: dict[str, Any]) -> tuple[int, int, int, list[int]]:
    sequence, position, layer = (int(row[name]) for name in COLUMNS[:3])
    experts = [int(expert) for expert in row["experts"]]
    small = 0 <= layer < MOST and all(0 <= expert < MOST for expert in experts) and experts
    if not (0 <= sequence < 2**31 and 0 <= position < 2**31 and small):
        raise ValueError("a number is out of range, or there is no expert")
    return sequence, position, layer, experts


def _refuse(path: Path, line: int, what: str) -> NoReturn:
    raise UsageError(
        f"{show_path(path)} line {line} is no routing: {what}.",
        "Write sequence, position, layer and experts of one token and layer in each line.",
    )
