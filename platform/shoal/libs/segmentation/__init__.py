"""A class for each pixel, for thin things such as roots: reading, crops, augmentation, losses, scores, a U-Net, tiles.

Called by recipes and benchmarks. Pure functions of arrays and tensors but for `photographs`, which reads a
folder, and `simulation`, which draws plants. Knows no training loop, device or process.
"""
