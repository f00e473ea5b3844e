"""The released size: 497,220 tensors in 96 files, opened in seconds and little memory.

The files are holes behind real headers, so the test needs about 140 MB of disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from k3offload import spec as spec_module
from k3offload.inventory import TensorSpec
from k3offload.spec import ModelSpec
from tests.helpers_checkpoint import INDEX, run_python

RELEASED = Path(spec_module.__file__).parent / "released"

OPEN = """
import resource, sys, time
from k3offload.checkpoint import Checkpoint
from k3offload.inspect import inspect
from k3offload.check import check
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, start = peak(), time.perf_counter()
c = Checkpoint.open(sys.argv[1])
seconds = time.perf_counter() - start
start = time.perf_counter()
for e in range(896): c.expert(45, e)
each = (time.perf_counter() - start) / 896
print(c.tensor_count, sum(c.bytes_by_group.values()), c.one_read_experts, len(c.notes))
print(seconds, each, peak() - before, 'torch' in sys.modules)
print(check(sys.argv[1]), peak() - before)
"""


def write_headers(path: Path, tensors: Iterable[TensorSpec], seen: dict[str, str]) -> None:
    """A shard of full size that is a hole behind its header."""
    header, at = {}, 0
    for tensor in tensors:
        end = at + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end],
        }  # fmt: skip
        seen[tensor.name], at = path.name, end
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + at)


def test_released_size_opens_quickly_and_small(tmp_path: Path) -> None:
    """Under 15 s and 300 MB above the imports; ``check`` sees nothing wrong and no torch."""
    spec, where = ModelSpec.load(RELEASED), dict[str, str]()
    assert spec.moe is not None
    rng = np.random.default_rng(0)
    for layer in range(93):
        tensors = spec.layer_tensors(layer)
        for expert in rng.permutation(spec.moe.experts if layer else 0):
            tensors += spec.expert_tensors(layer, int(expert))
        write_headers(tmp_path / f"model-{layer + 1:05d}-of-000096.safetensors", tensors, where)
    vision = spec.vision_tensors()
    for number, rest in ((94, spec.global_tensors()), (95, vision[-3:]), (96, vision[:-3])):
        write_headers(tmp_path / f"model-{number:05d}-of-000096.safetensors", rest, where)
    metadata = {"total_size": spec.total_bytes}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": where}))
    shutil.copy(RELEASED / "config.json", tmp_path)
    (tmp_path / "tiktoken.model").write_text("IQ== 0\n")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 163586}')
    done = run_python(OPEN, [tmp_path])
    first, second, third = done.stdout.decode().splitlines()
    assert first == "497220 1560860324864 82432 0", done.stderr
    seconds, each, kilobytes, torch = second.split()
    assert float(seconds) < 15
    assert float(each) < 1e-4
    assert int(kilobytes) < 300_000
    assert torch == "False"
    findings, kilobytes = third.rsplit(" ", 1)
    assert findings == "[]"
    assert int(kilobytes) < 300_000
