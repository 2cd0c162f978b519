"""Every row of a file or folder gets a registered model's outputs: `shoal batch-predict`."""
