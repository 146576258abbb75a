"""Rates of a machine for the floors of ``report.py``: matrix products, reads and copies."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sametoken.bench.roofline import CPU_BYTES, CUDA_BYTES, read_bandwidth
from sametoken.models.loader import load_model, read_config
from sametoken.ops.reference import PlainWeight, ReferenceKernels

WARM_PASSES, PASSES = 2, 7


class _Shapes(ReferenceKernels):
    """Records the matrix shapes of a model on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: Counter[tuple[int, ...]] = Counter()

    def pack(self, weight: Tensor) -> PlainWeight:
        self.packed[tuple(weight.shape)] += 1
        return super().pack(weight)


def weight_shapes(model: Path) -> dict[tuple[int, ...], int]:
    """Count the matrices of a model by shape [N, K]."""
    kernels = _Shapes()
    load_model(
        model,
        kernels=kernels,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        max_positions=1,
        load_format="dummy",
    )
    config = read_config(model)
    if not config.tie_word_embeddings:
        # The embedding is only gathered by row; it has the head's shape.
        kernels.packed[config.vocab_size, config.hidden_size] -= 1
    return dict(+kernels.packed)


def product_rate(shapes: dict[tuple[int, ...], int], rows: int, device: torch.device) -> float:
    """Measure operations per second of ``torch.mm`` in bf16 over all products of a model."""
    weights = {shape: _random(shape, device) for shape in shapes}
    inputs = {shape: _random((rows, shape[1]), device) for shape in shapes}
    most = max(shapes.values())

    def one_pass() -> None:
        # Interleaved as in layers; each matrix is larger than half of L2.
        for index in range(most):
            for shape, count in shapes.items():
                if index < count:
                    torch.mm(inputs[shape], weights[shape].t())

    operations = 2 * rows * sum(n * k * count for (n, k), count in shapes.items())
    return operations / _median_seconds(one_pass, device)


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Measure the bytes per second of a device copy, reads plus writes."""
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    destination = torch.empty_like(source)
    return 2 * num_bytes / _median_seconds(lambda: destination.copy_(source), device)


def machine_figures(models: list[Path], rows: int, device: torch.device) -> dict[str, Any]:
    """Measure all rates that the floors need; models by folder name."""
    on_cpu = device.type == "cpu"
    num_bytes = CPU_BYTES // 16 if on_cpu else CUDA_BYTES
    read = read_bandwidth(device, num_bytes)
    products = {}
    for model in models:
        # Of quantized models only what they have in bf16 is counted, which may be nothing.
        if shapes := weight_shapes(model):
            products[model.name] = product_rate(shapes, rows, device)
        if not on_cpu:
            torch.cuda.empty_cache()
    return {
        "device": "CPU" if on_cpu else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "rows": rows,
        "products": products,
        "read": read.bytes_per_second,
        "read_by": read.method,
        "copy": copy_rate(device, num_bytes),
    }


def _random(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Make random data: products of zeros are faster than real ones."""
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _median_seconds(work: Any, device: torch.device) -> float:
    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for _ in range(WARM_PASSES + PASSES):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[WARM_PASSES:])[PASSES // 2]
