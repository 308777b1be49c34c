"""A plugin for pytest: this package's slots in Megatron Core, for the tests that Megatron has."""

from mamba_cache.integrations import megatron


def pytest_configure(config):
    """Installs before a test module can import Megatron's class by its name."""
    megatron.install()
    print("replaced:", *megatron.replaced())
