"""Shared by all tests: one thread (the models are tiny) and no hub."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one process runs alone begins first, so that the other is not left waiting for it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def pytest_configure() -> None:
    import torch

    torch.set_num_threads(1)
