"""Names and values of the unsharded model: state dicts, gradients, buffers."""
