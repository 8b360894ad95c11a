"""One page that shows a run as it goes, and the JSON API behind it; it asks a core as an operator does."""
