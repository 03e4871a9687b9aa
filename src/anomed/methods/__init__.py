"""Detectors, one file each."""
