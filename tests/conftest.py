"""Options and fixtures of the whole suite."""

from pathlib import Path

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption(
        "--goldens",
        default=str(Path(__file__).parent / "goldens"),
        help="folder with <system>/*.npz files for the parity tests (default: tests/goldens)",
    )


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
