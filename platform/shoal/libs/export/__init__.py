"""A registered model as a folder that serves itself: ONNX, a handler, and no Shoal. `shoal export` calls it."""
