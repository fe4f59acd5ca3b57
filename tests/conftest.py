"""Shared by all tests: one thread (the models are tiny) and no hub."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure() -> None:
    import torch

    torch.set_num_threads(1)
