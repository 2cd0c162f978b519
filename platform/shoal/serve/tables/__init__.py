"""Tables through a model: columns in, columns out."""
