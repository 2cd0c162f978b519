"""What `batcher` is made of: in which order requests wait, and what a batch takes. Imports nothing else of serving."""
