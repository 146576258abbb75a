"""What the Triton backend refuses before it compiles anything."""

from __future__ import annotations

import pytest

from sametoken.errors import UnsupportedError
from sametoken.ops import triton


@pytest.mark.parametrize(
    ("capability", "version", "refused"),
    [
        ((10, 0), (3, 7), True),
        ((10, 3), (3, 8), False),
        ((9, 0), (3, 6), False),
        ((12, 0), (3, 6), False),
    ],
)
def test_a_compiler_that_does_not_know_the_gpu_is_refused(
    capability, version, refused, monkeypatch
):
    monkeypatch.setattr(triton, "TRITON_VERSION", version)
    if not refused:
        triton.require_compiler(capability)
        return
    with pytest.raises(UnsupportedError, match="Install torch"):
        triton.require_compiler(capability)
