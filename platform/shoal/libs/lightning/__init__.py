"""Modules of PyTorch Lightning as Tasks: `shoal.libs.lightning.task.LightningTask`."""
