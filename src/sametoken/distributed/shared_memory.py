"""Tensors of one process that another one of the same machine reads where they are.

On a GPU by torch's CUDA IPC, on a CPU in host memory. A device is named by the UUID of the GPU, or
by the boot of the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from sametoken.distributed.host_memory import HostMemory, mapped, places
from sametoken.errors import MAX_SHOWN, WeightUpdateError, clipped
from sametoken.types.weight_updates import MemoryHandle


def device_name(device: torch.device) -> str:
    """The name that no other device has, on any host."""
    if _is_gpu(device):
        properties: Any = torch.cuda.get_device_properties(device)
        return str(properties.uuid)
    return f"host-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def share(tensors: Sequence[Tensor]) -> tuple[object, list[dict[str, tuple[Any, ...]]]]:
    """Let one other process open tensors, once.

    Returns:
        What to keep until they were read: on a CPU a copy. And for each, by device, the arguments
        of torch's ``rebuild_cuda_tensor``, whose handle is a path on a CPU.
    """
    kept = [tensor.detach() for tensor in tensors]
    on_host = [one for one in kept if not _is_gpu(one.device)]
    starts, end = places(one.nbytes for one in on_host)
    memory = HostMemory(end)
    rest = iter(starts)
    found: list[dict[str, tuple[Any, ...]]] = []
    for one in kept:
        place = _exported(one) if _is_gpu(one.device) else _copied(one, memory, next(rest))
        found.append({device_name(one.device): place})
    return (kept, memory), found


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _exported(tensor: Tensor) -> tuple[Any, ...]:
    exported: tuple[Any, tuple[Any, ...]] = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return exported[1]


def _copied(tensor: Tensor, memory: HostMemory, first: int) -> tuple[Any, ...]:
    own = memory.bytes[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    own.copy_(tensor)
    offset = first // tensor.itemsize
    place = (torch.Tensor, own.size(), own.stride(), offset, torch.storage.TypedStorage, own.dtype)
    return (*place, 0, memory.path.encode(), len(memory.bytes), 0, False, b"", 0, b"", False)


def open_shared(handles: Mapping[str, MemoryHandle], device: torch.device) -> Tensor:
    """A tensor of another process, in its memory.

    Args:
        handles: by device.
        device: this process's.

    Raises:
        WeightUpdateError: it is on another device, or its process has ended.
    """
    here = device_name(device)
    if here not in handles:
        others = clipped(", ".join(handles), MAX_SHOWN)
        raise WeightUpdateError(
            f"the trainer's tensors are on {others or 'no device'}, the engine on {here}",
            "run both on one device of one host, or send the weights by nccl or gloo",
        )
    handle = handles[here]
    try:
        return _opened_on_gpu(handle, device) if _is_gpu(device) else _opened_on_host(handle)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise WeightUpdateError(
            f"a tensor of the trainer cannot be opened ({first})",
            "keep the trainer and its tensors alive until the update is finished",
        ) from error


def _opened_on_gpu(handle: MemoryHandle, device: torch.device) -> Tensor:
    index = torch.cuda.current_device() if device.index is None else device.index
    tensor: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor,
        handle.shape,
        handle.strides,
        handle.offset,
        torch.storage.TypedStorage,
        getattr(torch, handle.dtype),
        index,
        handle.memory,
        handle.num_bytes,
        handle.first_byte,
        False,
        handle.counter,
        handle.index,
        handle.event,
        handle.waits,
    )
    return tensor


def _opened_on_host(handle: MemoryHandle) -> Tensor:
    whole = mapped(handle.memory.decode(), handle.num_bytes)
    tensor = torch.empty(0, dtype=getattr(torch, handle.dtype))
    return tensor.set_(whole.untyped_storage(), handle.offset, handle.shape, handle.strides)
