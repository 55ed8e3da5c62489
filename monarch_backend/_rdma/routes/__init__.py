"""The routes of transfers, and the choice between them."""
