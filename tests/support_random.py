"""The numbers that torch draws."""

import torch


def seed(number: int) -> None:
    """`torch.manual_seed`, which takes milliseconds to note where it was called, for each kind of device that is not there."""
    if torch.cuda.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)
