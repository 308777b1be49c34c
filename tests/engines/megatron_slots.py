"""A plugin for pytest: this package's slots in Megatron Core, for Megatron's own tests."""

from mamba_cache.integrations import megatron


def pytest_configure(config):
    """Install before a test module imports Megatron's class by name."""
    megatron.install()
    print("replaced:", *megatron.replaced())
