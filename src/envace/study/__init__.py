"""Studies: the same settings with several seeds and variants, and what came out of them."""
