"""Members as lanes of a CPU's vectors: the numbers of 8 or 16 members fill a vector, whatever the layer.

`LanesEngine` computes chunks of members. Sources are generated for a model, compiled once and called through ctypes.
"""
