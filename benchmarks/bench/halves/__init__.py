"""How each peer is driven. A module is imported in the environment that its peer lives in."""
