"""The ways that the bytes of a transfer can take, and the choice between them."""
