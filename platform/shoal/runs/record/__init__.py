"""Writing the run record: SQLite, TensorBoard, provenance."""
