"""Steps of a fixed shape, recorded and replayed."""
