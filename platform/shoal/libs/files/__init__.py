"""Datasets in files: map-style, opened in the reading process, a batch at a time. And Ray Data, an iterable.

`shoal.data.formats` has them by name. Each is imported at its first use, to load only its own packages.
"""
