"""Model families as data: tensor names, geometry, biases. No weights."""
