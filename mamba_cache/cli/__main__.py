"""``python -m mamba_cache.cli``: the command line without its script."""

from mamba_cache.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
