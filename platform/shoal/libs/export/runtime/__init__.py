"""What runs within an exported folder. These modules, and those of ours that they import, are copied into it.

They need numpy, msgspec and onnxruntime, and nothing else but the standard library.
"""
