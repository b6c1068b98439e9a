import sys
from pathlib import Path

import pytest

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "runner"): sys.path.insert(0, str(folder))

from checkout import Checkout
from cluster import Cluster, install


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    "A running single-node SLURM; the test is skipped, with the reason, where it can't be had."
    if sys.platform != "linux": pytest.skip("SLURM runs on Linux only")
    reason = install()
    if reason: pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm")) as running: yield running


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    "A fresh toy checkout."
    return Checkout(tmp_path / "checkout")
