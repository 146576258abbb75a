"""What differs between the Tritons that kernels compile with, 3.6 to 3.10.

Names in Gluon that some of them changed are in ``hopper_layouts``.
"""

from __future__ import annotations

import triton

#: Major and minor.
TRITON_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))

#: Products fused with sums, rounded once: launch options of every kernel but those whose bits need
#: two roundings. Triton 3.10 fuses them only where a launch asks.
FUSED = {"enable_fp_fusion": True}

#: Whether the compiler deals a tensor's axes out to threads, after that of neighbours in memory,
#: from the last one on; before Triton 3.7 from the first one on.
LAST_AXIS_FIRST = TRITON_VERSION >= (3, 7)

#: Whether a view of shared memory may reach beyond what it is a view of; Triton 3.8 refuses it.
VIEWS_REACH_FURTHER = TRITON_VERSION < (3, 8)
