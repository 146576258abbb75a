"""The compiled C kernels as Python functions, and memory for packed weights in huge pages."""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import torch
from torch import Tensor

from sametoken.errors import UnsupportedError
from sametoken.ops.native.build import RECIPES, Recipe, build, find_compiler

logger = logging.getLogger(__name__)

_SIGNATURE_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The exported C functions; their contracts are in the C sources.

    Annotated with their arguments in order: p: pointer, i: int64, f: float. An int is an int64.
    """

    may_use_amx: Annotated[Callable[[], int], ""]
    team_size: Annotated[Callable[[], int], ""]
    prefer_large_pages: Annotated[Callable[[int, int], None], "pi"]
    packed_bytes: Annotated[Callable[..., int], "iii"]
    pack: Annotated[Callable[..., None], "ppiii"]
    gemm: Annotated[Callable[..., None], "ppppiiiii"]
    embedding: Annotated[Callable[..., int], "pppiiii"]
    quantized_bytes: Annotated[Callable[[int, int], int], "pi"]
    pack_quantized: Annotated[Callable[..., None], "pppppi"]
    quantized_gemm: Annotated[Callable[..., int], "pppppiiiiif"]
    quantized_rows: Annotated[Callable[..., int], "ppppiii"]
    integer_bytes: Annotated[Callable[[int, int], int], "pi"]
    pack_integers: Annotated[Callable[..., None], "pppppi"]
    integer_gemm: Annotated[Callable[..., int], "pppppiiii"]
    integer_rows: Annotated[Callable[..., int], "ppppiii"]
    rms_norm: Annotated[Callable[..., None], "ppppiifii"]
    add_rms_norm: Annotated[Callable[..., None], "pppiifii"]
    silu_mul: Annotated[Callable[..., None], "ppiii"]
    gelu_mul: Annotated[Callable[..., None], "ppiii"]
    clamped_swiglu: Annotated[Callable[..., None], "ppiiffi"]
    soft_cap: Annotated[Callable[..., None], "ppiif"]
    sigmoid_mul: Annotated[Callable[..., None], "pppiii"]
    relu_squared: Annotated[Callable[..., None], "ppii"]
    gated_group_norm: Annotated[Callable[..., None], "ppppiiifii"]
    rope_and_cache: Annotated[Callable[..., None], "ppppppppppppfiiiiiiiii"]
    attention: Annotated[Callable[..., int], "ppppppppppiiiiiiiiifi"]
    decoder_layers: Annotated[Callable[..., int], "ppi" + "pp" + "ppppi" + "iii" + "pppi"]
    head_products: Annotated[Callable[..., None], "pppiiiiiiiii"]
    latent_rope_and_cache: Annotated[Callable[..., None], "ppppppppppf" + "iiii" + "iiiii" + "iiii"]
    sample: Annotated[Callable[..., int], "pppppppiiii"]
    step_rows: Annotated[Callable[..., None], "piiii" + "pi" + "pp" + "ppi" + "piii" + "ppppp"]
    verify_windows: Annotated[Callable[..., None], "pii" + "ppipp" + "ppp"]
    deliver_results: Annotated[Callable[..., None], "ppppp" + "ppi" + "pi" + "pi"]
    gated_delta: Annotated[Callable[..., int], "pip" + "pppp" + "iiiii"]
    mamba2: Annotated[Callable[..., int], "pip" + "ppppp" + "iiii" + "ff" + "i"]


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
    if recipe.borrows:
        # A second runtime would compete with torch's for cores and ignore set_num_threads.
        for runtime in openmp_runtimes():
            ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(f"{path} does not load: {error}", "remove it and retry") from error
    hints = get_type_hints(NativeLibrary, include_extras=True)
    found = NativeLibrary(**{name: _typed(library, name, hint) for name, hint in hints.items()})
    if not found.may_use_amx():
        raise UnsupportedError(
            "the system lets no process use the matrix units (AMX)", "use a newer kernel"
        )
    return found


def _typed(library: ctypes.CDLL, name: str, hint: Any) -> Any:
    form, arguments = get_args(hint)
    function = getattr(library, name)
    function.argtypes = [_SIGNATURE_TYPES[letter] for letter in arguments]
    function.restype = ctypes.c_int64 if get_args(form)[-1] is int else None
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
