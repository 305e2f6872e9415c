"""`/pooling`, `/classify`."""
