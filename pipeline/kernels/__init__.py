"""Pure tensor functions: they import torch and each other, keep the device of their inputs and never change them."""
