"""How the weights of the baseline get to where they are used: what people pick instead.

``resident``           all of them in memory before the first token
``mmap``               all of them mapped from the files, for the page cache to bring and to drop
``accelerate-cpu``     ``cpu_offload``: all in memory, brought to the executing device by hooks
``accelerate-disk``    ``dispatch_model``: the trunk in memory, every expert on disk
``accelerate-auto``    the same, with experts in memory for as long as ``infer_auto_device_map``
                       finds room in the budget, the first layers first

``accelerate`` reads from the safetensors files themselves, as it does for transformers: nothing is
copied to a folder of its own.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from benchmarks.baselines.model import K3, Glu, Moe, read_config

PREFIX = "language_model."
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
ROOM = 400_000_000  #: bytes of the budget that ``accelerate-auto`` leaves to computing


class Place(NamedTuple):
    file: Path
    tensor: str


def places(folder: Path) -> dict[str, Place]:
    """Where each parameter of the text model lies."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {
        name.removeprefix(PREFIX): Place(folder / file, name)
        for name, file in index.items()
        if name.startswith(PREFIX)
    }


def opened(folder: Path, way: str, budget: int) -> K3:
    """The model of ``folder`` with its weights brought in this ``way`` inside ``budget`` bytes."""
    with torch.device("meta"):
        model = K3(read_config(folder))
    which = places(folder)
    wrong = which.keys() ^ {name for name, _ in model.named_parameters()}
    if wrong:
        raise ValueError(f"{folder} and its config.json differ in {len(wrong)}: {min(wrong)}, ...")
    WAYS[way](model.eval(), which, budget)
    return model


def _tensors(which: Mapping[str, Place]) -> Iterator[tuple[str, Tensor]]:
    """Views of the mapped files: nothing is read before it is used."""
    by_file: dict[Path, list[str]] = {}
    for name, place in which.items():
        by_file.setdefault(place.file, []).append(name)
    for file, several in by_file.items():
        with file.open("rb") as opened_file:
            length = int.from_bytes(opened_file.read(8), "little")
            header = json.loads(opened_file.read(length))
        size = file.stat().st_size
        whole = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
        for name in several:
            about = header[which[name].tensor]
            begin, end = (8 + length + at for at in about["data_offsets"])
            yield name, whole[begin:end].view(DTYPES[about["dtype"]]).view(about["shape"])


def _mapped(model: K3, which: Mapping[str, Place], budget: int = 0) -> None:
    model.load_state_dict(dict(_tensors(which)), assign=True)


def _resident(model: K3, which: Mapping[str, Place], budget: int = 0) -> None:
    """A copy of each, so that it does not depend on the page cache."""
    for name, tensor in _tensors(which):
        owner, _, last = name.rpartition(".")
        copy = torch.nn.Parameter(tensor.clone(), requires_grad=False)
        setattr(model.get_submodule(owner), last, copy)


def _accelerate_cpu(model: K3, which: Mapping[str, Place], budget: int) -> None:
    from accelerate import cpu_offload

    _resident(model, which)
    cpu_offload(model, execution_device=_device())


def _accelerate_disk(model: K3, which: Mapping[str, Place], budget: int) -> None:
    _dispatched(model, which, _device_map(model, on_disk(model, 0)))


def _accelerate_auto(model: K3, which: Mapping[str, Place], budget: int) -> None:
    trunk = sum(p.nbytes for name, p in model.named_parameters() if ".experts." not in name)
    room = budget - ROOM - trunk - int(psutil.Process().memory_info().rss)
    _dispatched(model, which, _device_map(model, on_disk(model, room)))


def on_disk(model: K3, room: int) -> set[str]:
    """Names of the experts that ``room`` bytes of memory do not hold: the library fills it in the
    order of the model.  What is no expert has its place before them: every token uses it."""
    from accelerate import infer_auto_device_map

    every = torch.nn.ModuleDict(
        {
            name.split(".")[2]: module.experts
            for name, module in model.named_modules()
            if isinstance(module, Moe)
        }
    )
    found = infer_auto_device_map(
        every, max_memory={"cpu": max(1, room)}, no_split_module_classes=["Glu"]
    )
    disk = set()
    for name, module in every.named_modules():
        if isinstance(module, Glu):
            layer, _, expert = name.partition(".")
            if next(found[part] for part in (name, layer, "") if part in found) == "disk":
                disk.add(f"model.layers.{layer}.block_sparse_moe.experts.{expert}")
    return disk


def _device_map(model: K3, disk: set[str]) -> OrderedDict[str, Any]:
    """The modules of ``disk`` there, all others where there is memory."""
    leaves = {n.rpartition(".")[0] for n, _ in model.named_parameters()}
    own = {leaf for leaf in leaves if not any(leaf.startswith(name + ".") for name in disk)}
    return OrderedDict(
        [*((name, "cpu") for name in sorted(own)), *((n, "disk") for n in sorted(disk))]
    )


def _dispatched(model: K3, which: Mapping[str, Place], device_map: OrderedDict[str, Any]) -> None:
    from accelerate import dispatch_model

    disk = tuple(f"{name}." for name, at in device_map.items() if at == "disk")
    away = {name: place for name, place in which.items() if disk and name.startswith(disk)}
    _resident(model, {name: place for name, place in which.items() if name not in away})
    index = {
        name: {"safetensors_file": str(place.file), "weight_name": place.tensor}
        for name, place in away.items()
    }
    dispatch_model(model, device_map, main_device=_device(), offload_index=index)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


WAYS: dict[str, Callable[[K3, Mapping[str, Place], int], None]] = {
    "resident": _resident,
    "mmap": _mapped,
    "accelerate-cpu": _accelerate_cpu,
    "accelerate-disk": _accelerate_disk,
    "accelerate-auto": _accelerate_auto,
}
