"""What operators get to see: figures, metrics over HTTP, warnings, recordings."""
