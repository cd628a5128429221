"""Model families as data: tensor names, geometry and config fields, without weights."""
