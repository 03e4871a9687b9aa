"""One exact, reproducible benchmark table for medical anomaly detection."""
