"""Pure tensor functions. They import only torch and each other, stay on the device of their inputs, and never change
them."""
