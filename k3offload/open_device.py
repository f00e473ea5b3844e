"""Which accelerator serves, and how much of its memory may be used."""

from __future__ import annotations

import sys

import torch

from .config import show_size
from .errors import DoesNotFit, UsageError
from .kernels.triton_run import installed
from .tiers.device import Device
from .tiers.device_cuda import CudaDevice

OLDEST = (8, 0)  #: compute capability that kernels are compiled for


def open_device(wanted: str | Device) -> tuple[Device | None, str]:
    """The device that ``--device`` names, and in one sentence why it is that one.

    ``UsageError`` if a GPU was asked for by name and cannot be used.
    """
    if not isinstance(wanted, str):
        return wanted, f"device: {wanted.name}, as given"
    kind, _, number = wanted.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (number and (kind != "cuda" or not number.isdigit())):
        raise UsageError(f"--device {wanted!r} is not known.", "Use auto, cuda, cuda:N or cpu.")
    if kind == "cpu":
        return None, "device: cpu, as asked"
    index = int(number or 0)
    why = why_no_gpu(index)
    if not why:
        try:
            device = CudaDevice(index)
        except Exception as error:  # a driver may raise anything
            why = f"CUDA does not start: {error}"
        else:
            return device, f"device: {device.name}"
    if kind == "cuda":
        raise UsageError(
            f"--device {wanted} cannot be used: {why}.",
            "Use --device cpu, or install a torch with CUDA (pip install torch) and the driver.",
        )
    return None, f"device: cpu ({why})"


def why_no_gpu(index: int) -> str:
    """Why GPU number ``index`` cannot be used; empty if it can."""
    if torch.version.cuda is None:
        return "this torch is not built for CUDA"
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception as error:  # a broken driver may raise anything
        return f"CUDA does not start: {error}"
    if index >= count:
        return f"CUDA finds {count} GPUs"
    own = torch.cuda.get_device_capability(index)
    if own < OLDEST:
        return f"GPU {index} is of compute capability {own[0]}.{own[1]}, older than 8.0"
    return "" if installed() else f"Triton is not installed for {sys.platform}"


def vram_limit(device: Device, vram: int | None, reserve: int) -> int:
    """Bytes of the device that may be used: what is asked for, if that is free.  A part of
    ``reserve`` is in use since the device was opened."""
    free = device.free_bytes()
    if vram is None:
        return int(free * 0.95)
    if vram > free + reserve:
        raise DoesNotFit(
            f"--vram {vram:,} is more than the {free:,} bytes ({show_size(free)}) that are free "
            f"on {device.name}.",
            f"Give --vram {free // 10**6}M or less.",
            missing=vram - free,
        )
    return vram
