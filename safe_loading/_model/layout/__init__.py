"""Where each parameter of a model lies in its checkpoint: names, blocks of tensors, and no tensor is touched."""
