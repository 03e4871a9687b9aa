"""From scanner volumes to prepared images."""
