"""The compiled C kernels as Python functions, and memory for packed weights in huge pages."""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.ops.native.build import RECIPES, Recipe, build, find_compiler

logger = logging.getLogger(__name__)

_SIGNATURE_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
#: Arguments in order (p: pointer, i: int64, f: float) and whether an int64 is returned.
_SIGNATURES = {
    "team_size": ("", True),
    "prefer_large_pages": ("pi", False),
    "packed_bytes": ("iii", True),
    "pack": ("ppiii", False),
    "gemm": ("ppppiiiii", False),
    "embedding": ("pppiiii", True),
    "quantized_bytes": ("pi", True),
    "pack_quantized": ("pppppi", False),
    "quantized_gemm": ("pppppiiiiif", True),
    "quantized_rows": ("ppppiii", True),
    "integer_bytes": ("pi", True),
    "pack_integers": ("pppppi", False),
    "integer_gemm": ("pppppiiii", True),
    "integer_rows": ("ppppiii", True),
    "rms_norm": ("ppppiifii", False),
    "add_rms_norm": ("pppiifii", False),
    "silu_mul": ("ppiii", False),
    "gelu_mul": ("ppiii", False),
    "clamped_swiglu": ("ppiiffi", False),
    "soft_cap": ("ppiif", False),
    "sigmoid_mul": ("pppiii", False),
    "relu_squared": ("ppii", False),
    "gated_group_norm": ("ppppiiifii", False),
    "rope_and_cache": ("ppppppppppppfiiiiiiiii", False),
    "attention": ("ppppppppppiiiiiiiiifi", True),
    "decoder_layer": ("ppppfi" + "ppppi" + "ppppii" + "i", True),
    "head_products": ("pppiiiiiiiii", False),
    "latent_rope_and_cache": ("pppppppppf" + "iiii" + "iiiii" + "iii", False),
    "sample": ("pppppppiiii", True),
    "gated_delta": ("pip" + "pppp" + "iiiii", True),
    "mamba2": ("pip" + "ppppp" + "iiii" + "ff" + "i", True),
}


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The exported C functions; their contracts are in the C sources."""

    team_size: Callable[[], int]
    prefer_large_pages: Callable[[int, int], None]
    packed_bytes: Callable[..., int]
    pack: Callable[..., None]
    gemm: Callable[..., None]
    embedding: Callable[..., int]
    quantized_bytes: Callable[[int, int], int]
    pack_quantized: Callable[..., None]
    quantized_gemm: Callable[..., int]
    quantized_rows: Callable[..., int]
    integer_bytes: Callable[[int, int], int]
    pack_integers: Callable[..., None]
    integer_gemm: Callable[..., int]
    integer_rows: Callable[..., int]
    rms_norm: Callable[..., None]
    add_rms_norm: Callable[..., None]
    silu_mul: Callable[..., None]
    gelu_mul: Callable[..., None]
    clamped_swiglu: Callable[..., None]
    soft_cap: Callable[..., None]
    sigmoid_mul: Callable[..., None]
    relu_squared: Callable[..., None]
    gated_group_norm: Callable[..., None]
    rope_and_cache: Callable[..., None]
    attention: Callable[..., int]
    decoder_layer: Callable[..., int]
    head_products: Callable[..., None]
    latent_rope_and_cache: Callable[..., None]
    sample: Callable[..., int]
    gated_delta: Callable[..., int]
    mamba2: Callable[..., int]


@functools.cache
def load_library() -> NativeLibrary:
    """Build if needed, and load with the first recipe that works here.

    Raises:
        UnsupportedError: there is no C compiler, or no recipe works.
    """
    compiler = find_compiler()
    failures: list[UnsupportedError] = []
    for recipe in RECIPES:
        try:
            library = _opened(recipe, build(recipe, compiler))
        except UnsupportedError as error:
            logger.info("kernels with %s: %s", recipe.name, error)
            failures.append(error)
            continue
        if failures:
            logger.warning("the CPU kernels use %s, since %s", recipe.name, failures[0])
        return library
    raise failures[-1]


def openmp_runtimes() -> list[Path]:
    """OpenMP runtimes of torch: those mapped into this process, otherwise those it ships."""
    maps = Path("/proc/self/maps")
    mapped = re.findall(r"/\S+", maps.read_text()) if maps.exists() else []
    found = _named_openmp(Path(name) for name in mapped)
    return found or _named_openmp((Path(torch.__file__).parent / "lib").iterdir())


def _named_openmp(paths: Iterable[Path]) -> list[Path]:
    return sorted({path for path in paths if re.match(r"lib(gomp|iomp5|omp)[-.]", path.name)})


def _opened(recipe: Recipe, path: Path) -> NativeLibrary:
    if "-fopenmp" in recipe.compile_flags and not recipe.link_flags:
        # A second runtime would compete with torch's for cores and ignore set_num_threads.
        for runtime in openmp_runtimes():
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(f"{path} does not load: {error}", "remove it and retry") from error
    return NativeLibrary(**{name: _typed(library, name) for name in _SIGNATURES})


def _typed(library: ctypes.CDLL, name: str) -> Any:
    arguments, returns = _SIGNATURES[name]
    function = getattr(library, name)
    function.argtypes = [_SIGNATURE_TYPES[letter] for letter in arguments]
    function.restype = ctypes.c_int64 if returns else None
    return function


ALIGNMENT = 64


class WeightMemory:
    """Slab allocator of packed weights.

    A weight of a megabyte cannot fill a huge page, and streaming it through small pages is about
    a third slower. The untouched rest of a slab takes no memory.

    Args:
        prefer_large_pages: ``(address, bytes)``, called on each new slab.
        slab_bytes: size of a slab; larger weights get a separate one.
    """

    def __init__(
        self, prefer_large_pages: Callable[[int, int], None], slab_bytes: int = 1 << 26
    ) -> None:
        self._prefer_large_pages = prefer_large_pages
        self._slab_bytes = slab_bytes
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """``size`` bytes, 64-byte aligned, uninitialised."""
        if self._used + size > self._slab.numel():
            self._slab = torch.empty(max(size, self._slab_bytes), dtype=torch.uint8)
            self._prefer_large_pages(self._slab.data_ptr(), self._slab.numel())
            self._used = 0
        start = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return self._slab[start : start + size]
