"""Studies: the same settings over several seeds and variants, and the report that compares them."""
