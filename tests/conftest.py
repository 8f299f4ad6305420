"""What every test leaves as it found it."""
import pytest
import torch


@pytest.fixture(autouse=True)
def grad_mode():
    "One test that leaves gradients switched off must not fail all that come after it in its process."
    torch.set_grad_enabled(True)
    yield
    torch.set_grad_enabled(True)
