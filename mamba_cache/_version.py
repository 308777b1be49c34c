"""The version, where the build backend reads it without importing the package."""

__all__ = ["__version__"]

__version__ = "0.3.0"
