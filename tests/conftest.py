import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)  # tests run beside each other; tiny tensors gain nothing from more
