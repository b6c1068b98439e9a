"""Kernel tests run the Triton code itself, in Triton's interpreter.

The interpreter must be on before a kernel's module is imported, so this folder is a test run of its own:
`python -m pytest ci/tests/kernels`.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

torch.set_num_threads(1)
TOO_LATE = [m for m in sys.modules if m.startswith("neurips26_lit.kernels.")]


@pytest.fixture(scope="session", autouse=True)
def interpreter():
    "Fail at once, with the reason, where a kernel was compiled for a GPU before this file was read."
    if TOO_LATE:
        pytest.fail(f"{TOO_LATE[0]} was imported without the interpreter; run this folder in its own process: pytest ci/tests/kernels")
