import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from checkout import Checkout


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    "A fresh toy checkout."
    return Checkout(tmp_path / "checkout")
