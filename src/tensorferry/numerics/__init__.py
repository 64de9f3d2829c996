"""How element types and transforms are computed, in torch."""
