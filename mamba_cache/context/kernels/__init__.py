"""What runs on the device between two steps of speculative decoding."""

__all__: list[str] = []
