"""Finds what users add: by a word of a spec, or by an entry point of a package. `shoal.extend` has the interfaces."""
