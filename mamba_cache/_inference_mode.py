"""Tensors that are kept from call to call, made outside of PyTorch's inference mode."""

import torch

__all__ = ["outside_inference_mode"]

outside_inference_mode = torch.inference_mode(mode=False)
"""Decorates what makes such tensors.

What is made in inference mode cannot be written outside of it ever after, and engines use one
context in and out of it.
"""
