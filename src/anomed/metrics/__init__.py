"""Metrics, usable alone on numpy arrays; no torch at import."""
