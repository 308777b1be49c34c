"""What outlives the call that makes it."""

import torch

__all__ = ["lasting"]

lasting = torch.inference_mode(mode=False)
"""Decorates what makes tensors that are kept from call to call.

What is made in PyTorch's inference mode cannot be written outside of it ever after, and engines
use one context in and out of it.
"""
