"""Prefix caching for hybrid language models."""
