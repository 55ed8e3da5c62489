"""Routes of transfers, the interface that they implement, and the choice between them."""
