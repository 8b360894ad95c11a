"""The dashboard: its pure parts, its API over a real core, and its page in a real browser."""
