"""Every test here needs a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    # The hook is given every test of the run, not those of this folder alone.
    if not torch.cuda.is_available():
        for item in items:
            if FOLDER not in item.path.parents:
                continue
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
