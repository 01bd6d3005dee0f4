"""Train one model on unequal devices, as fast as they allow."""
